"""The configs of `adapters`: every option of version 1.3.0, and the values that Inlay can follow.

An option without a counterpart here is a field that takes only the value that changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from inlay.checkpoints.foreign.files import only
from inlay.config import Config
from inlay.errors import ConfigError

Finite = Annotated[float, Field(allow_inf_nan=False)]
Factor = Annotated[Finite, Field(ge=1e-6)]
Share = Annotated[float, Field(ge=0, lt=1)]
ACTIVATIONS = {"leakyrelu": "leaky_relu", "swish": "silu"}
"""Theirs to ours, where the names differ."""
_OLD_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}
"""In files without a version."""
_OLD_FUSION = ("attention_type", "new_attention_norm")
"""Options of a fusion that the first versions wrote into the config of each adapter."""
_INVERTIBLE = ("invertible_adapter", "inv_adapter", "inv_adapter_reduction_factor")


class BottleneckOptions(Config):
    """BnConfig of `adapters`: seq_bn, double_seq_bn, par_bn, compacter and variants of them."""

    architecture: None = None
    mh_adapter: bool
    output_adapter: bool
    reduction_factor: Factor | Annotated[dict[str, Factor], Field(min_length=1)]
    non_linearity: str
    original_ln_before: bool = False
    original_ln_after: Annotated[bool, only(True, why="the host's own norm always acts after the sum")] = True
    ln_before: bool = False
    ln_after: Annotated[bool, only(False, why="a norm after the up-projection has no counterpart")] = False
    init_weights: Literal["bert", "mam_adapter", "houlsby"] = "bert"
    init_weights_seed: int | None = None
    is_parallel: bool = False
    scaling: Finite | Annotated[str, only("learned", why="a scale per channel has no counterpart")] = 1.0
    use_gating: bool = False
    residual_before_ln: bool | str = True
    adapter_residual_before_ln: bool = False
    inv_adapter: Annotated[str | None, only(None, why="invertible adapters have no counterpart")] = None
    inv_adapter_reduction_factor: float | None = None
    invertible_adapter: Annotated[Any, only(None, False, why="invertible adapters have no counterpart")] = None
    cross_adapter: Annotated[bool, only(False, why="adapters after cross-attention have no counterpart")] = False
    leave_out: tuple[int, ...] = ()
    dropout: Share = 0.0
    phm_layer: bool = False
    phm_dim: int = Field(default=4, ge=1)
    factorized_phm_W: bool = True
    shared_W_phm: Annotated[bool, only(False, why="weights shared by all layers have no counterpart")] = False
    shared_phm_rule: bool = True
    factorized_phm_rule: Annotated[bool, only(False, why="a factorised rule has no counterpart")] = False
    phm_c_init: str = "normal"
    phm_init_range: float = 0.0001
    learn_phm: bool = True
    hypercomplex_nonlinearity: str = "glorot-uniform"
    phm_rank: int = Field(default=1, ge=1)
    phm_bias: Annotated[bool, only(True, why="PHM layers have a bias here")] = True
    stochastic_depth: Annotated[float, only(0.0, why="stochastic depth has no counterpart")] = 0.0

    def factors(self) -> list[float]:
        """Every reduction factor that it names."""
        return (
            list(self.reduction_factor.values()) if isinstance(self.reduction_factor, dict) else [self.reduction_factor]
        )


class LoraOptions(Config):
    """LoRAConfig of `adapters`."""

    architecture: Literal["lora"] = "lora"
    selfattn_lora: bool = True
    intermediate_lora: bool = False
    output_lora: bool = False
    leave_out: tuple[int, ...] = ()
    r: int = Field(default=8, ge=1)
    alpha: Annotated[Finite, Field(gt=0)] = 8
    dropout: Share = 0.0
    attn_matrices: tuple[Literal["q", "k", "v"], ...] = ("q", "v")
    composition_mode: Literal["add", "scale"] = "add"
    init_weights: str = "lora"
    init_weights_seed: int | None = None
    use_gating: bool = False
    use_dora: Annotated[bool, only(False, why="DoRA rescales the host's weights")] = False
    vera_d: Annotated[float | None, only(None, why="VeRA has no counterpart")] = None
    vera_b: Annotated[float | None, only(None, why="VeRA has no counterpart")] = None
    dtype: str | None = None


class PrefixOptions(Config):
    """PrefixTuningConfig of `adapters`."""

    architecture: Literal["prefix_tuning"] = "prefix_tuning"
    encoder_prefix: bool = True
    cross_prefix: bool = True
    leave_out: tuple[int, ...] = ()
    flat: bool = False
    prefix_length: int = Field(default=30, ge=1)
    bottleneck_size: int = Field(default=512, ge=1)
    non_linearity: Annotated[str, only("tanh", why="the network that makes a prefix has a tanh here")] = "tanh"
    dropout: Annotated[float, only(0.0, why="dropout on a prefix has no counterpart")] = 0.0
    use_gating: bool = False
    shared_gating: bool = True
    init_weights_seed: int | None = None


class FusionOptions(Config):
    """AdapterFusionConfig of `adapters`."""

    key: Annotated[bool, only(True, why="a fusion without keys has no counterpart")] = True
    query: Annotated[bool, only(True, why="a fusion without queries has no counterpart")] = True
    value: bool = True
    query_before_ln: bool = False
    regularization: bool = True
    residual_before: Annotated[bool, only(False, why="values that include the residual have no counterpart")] = False
    temperature: Annotated[
        bool, only(False, why="`adapters` lets the temperature fall at every call and does not save it")
    ] = False
    value_before_softmax: bool = True
    value_initialized: bool | str = True
    dropout_prob: Share | None = None


PartOptions = BottleneckOptions | LoraOptions | PrefixOptions
OPTIONS: dict[str | None, type[BottleneckOptions] | type[LoraOptions] | type[PrefixOptions]] = {
    None: BottleneckOptions,
    "lora": LoraOptions,
    "prefix_tuning": PrefixOptions,
}


def parts_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configs of which a union is made; of any other config, itself."""
    if config.get("architecture") != "union":
        return [config]
    parts = config.get("configs")
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise ConfigError("a union should have a list of configs")
    return parts


def options_kind(config: dict[str, Any]) -> type[BottleneckOptions] | type[LoraOptions] | type[PrefixOptions]:
    architecture = config.get("architecture")
    if not isinstance(architecture, str | None) or architecture not in OPTIONS:
        raise ConfigError(
            f"adapters of the architecture {architecture!r} have no counterpart in Inlay; "
            f"it reads bottleneck adapters, LoRA, IA3, prefixes and UniPELT."
        )
    return OPTIONS[architecture]


def as_trained(config: dict[str, Any], version: str | None, kind: str | None) -> dict[str, Any]:
    """The config of an older version, in the options that mean the same today."""
    config = dict(config)
    if version is None and config.get("non_linearity") in _OLD_ACTIVATIONS:
        config["non_linearity"] = _OLD_ACTIVATIONS[config["non_linearity"]]
    if version is None and not config.get("new_attention_norm"):
        config = {name: value for name, value in config.items() if name not in _OLD_FUSION}
    if kind == "text_task":  # the first versions wrote what only their language adapters had
        config = {name: value for name, value in config.items() if name not in _INVERTIBLE}
    number = (version or "").removeprefix("adapters.").split(".")
    before_1_1 = (version or "").startswith("adapters.") and number[:2] in (["0", "1"], ["0", "2"], ["1", "0"])
    if before_1_1 and config.get("architecture") == "lora" and "r" in config:
        config["alpha"] = config["r"]  # adapters before 1.1.0 left the scale out
    return config
