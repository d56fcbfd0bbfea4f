"""adapter_config.json of peft: every option, and the values that Inlay can follow."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import PreTrainedModel

from inlay.checkpoints.foreign.files import Folder, only, options
from inlay.config import Config

CONFIG, SAFE, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
Bias = Literal["none", "targets", "all"]
BIASES: dict[Literal["none", "lora_only", "all"], Bias] = {"none": "none", "lora_only": "targets", "all": "all"}
"""peft's words for whose biases are trained, and ours."""
Names = tuple[str, ...] | str | None
"""The ends of module names, or one pattern for whole names."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NOTES = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
    "runtime_config", "megatron_core", "qalora_group_size", "eva_config", "lora_ga_config",
}  # fmt: skip
"""Options that only say where a file comes from or how its training began."""


CLASSIFIER = "SEQ_CLS"
TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": CLASSIFIER,
}
"""peft's word for a host, by the end of its class's name."""


def task_type(host: PreTrainedModel) -> str | None:
    """peft's word for what a host does, if it has one."""
    return next((task for end, task in TASK_TYPES.items() if type(host).__name__.endswith(end)), None)


def _absent(*neutral: Any) -> Any:
    return only(None, *neutral, why="it has no counterpart in LoRA as Inlay has it")


class PeftOptions(Config):
    """LoraConfig of peft 0.21 and of its first versions, without `NOTES`."""

    # followed
    peft_type: Annotated[
        str, only("LORA", why="of peft's methods Inlay reads LoRA, IA3, PREFIX_TUNING and PROMPT_TUNING")
    ]
    r: int = Field(default=8, ge=1)
    lora_alpha: Positive = 8
    target_modules: Names = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] | None = None
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] | None = None
    alpha_pattern: dict[str, Positive] | None = None
    exclude_modules: Names = None
    layers_to_transform: tuple[int, ...] | int | None = None
    layers_pattern: Names = None
    # read from the host instead
    fan_in_fan_out: bool = False
    init_lora_weights: Annotated[
        bool | str | None,
        only(True, False, None, "gaussian", "eva", "orthogonal", why="this start changes the host's own weights too"),
    ] = True
    # allowed only where they change nothing
    alora_invocation_tokens: Annotated[Any, _absent()] = None
    arrow_config: Annotated[Any, _absent()] = None
    corda_config: Annotated[Any, _absent()] = None
    enable_lora: Annotated[Any, _absent()] = None
    ensure_weight_tying: Annotated[Any, _absent(False)] = False
    kasa_config: Annotated[Any, _absent()] = None
    layer_replication: Annotated[Any, _absent()] = None
    loftq_config: Annotated[Any, _absent({})] = None
    lora_bias: Annotated[Any, _absent(False)] = False
    megatron_config: Annotated[Any, _absent()] = None
    merge_weights: Annotated[Any, _absent(False)] = False
    monteclora_config: Annotated[Any, _absent()] = None
    target_parameters: Annotated[Any, _absent([])] = None
    trainable_token_indices: Annotated[Any, _absent()] = None
    use_bdlora: Annotated[Any, _absent(False)] = None
    use_dora: Annotated[Any, only(False, None, why="DoRA rescales the host's weights")] = False
    use_qalora: Annotated[Any, _absent(False)] = False
    velora_config: Annotated[Any, _absent()] = None

    @property
    def all_linear(self) -> bool:
        """Whether it means every linear map of the host."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"


def read_options(folder: Folder) -> PeftOptions:
    told = {key: value for key, value in folder.object(CONFIG).items() if key not in NOTES}
    return options(PeftOptions, told, folder / CONFIG)
