"""Make the golden files: small checkpoints and logits from the peer libraries, for the parity tests.

Two environments are needed, because `adapters` 1.3.0 pins transformers 4.57:

    pip install torch==2.13.0 && pip install adapters==1.3.0 transformers==4.57.6
    python tools/make_golden.py adapters        # first: it also makes the hosts bert, roberta, t5, gpt2 and bart

    pip install torch==2.13.0 && pip install peft==0.21.2 transformers==5.22.2
    python tools/make_golden.py peft            # second: it reads those hosts, and makes the others

Written below `tests/golden/`, the same bytes at every run:

    <host>/host/                  a tiny random host, as `save_pretrained` writes it
    <host>/inputs.safetensors     the inputs, and `bare`: the logits of the bare host
    <host>/<case>/                a checkpoint exactly as the peer library saves it
    <host>/<case>/expected.safetensors
        logits                    of the host with that checkpoint active
        attention.<layer>.<site>  (B, T, N), fusions only; layers and sites as `adapters` numbers and names them

A case with one adapter has its files in the case's folder, otherwise in a folder for each adapter, and `fusion/`.
Every checkpoint is read back by the library that wrote it, and must then give the same logits bit for bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    BartForConditionalGeneration,
    BertGenerationDecoder,
    PhiForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)
from transformers import AutoModelForSequenceClassification as SequenceClassifier

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
B, T, T_DECODER, VOCAB = 3, 9, 7, 40
ROW_LENGTHS = (9, 6, 4)
FIRST_WORD = 3  # ids below are padding, start and end in one host or another
SPREAD, HOST_SPREAD = 0.3, 0.2  # with more, the hosts' own softmaxes are one-hot
CLEARLY_DIFFERENT = 1e-2

TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
TINY_DISTILBERT = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12}
BERT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
SPECIAL = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}  # where the defaults are outside the vocabulary
HOSTS: dict[str, dict[str, Any]] = {
    "bert": dict(BERT, max_position_embeddings=32),
    "roberta": dict(BERT, max_position_embeddings=32),
    "gpt2": dict(n_embd=24, n_layer=2, n_head=2, n_inner=32, n_positions=32, num_labels=3, **SPECIAL),
    # Tied embeddings, because transformers 5 ties those of every T5.
    "t5": {"d_model": 24, "num_layers": 2, "num_heads": 2, "d_kv": 12, "d_ff": 32, "decoder_start_token_id": 0},
    # One key-value head for two query heads, so that the outputs of q and v differ in size.
    "llama": dict(BERT, num_key_value_heads=1, max_position_embeddings=32, **SPECIAL),
    # For one or two cases each, and so as small as can be.
    "bart": dict(
        d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=16, forced_eos_token_id=None,
        decoder_start_token_id=2, **SPECIAL,
    ),
    "distilbert": dict(TINY_DISTILBERT, max_position_embeddings=16, num_labels=3),
    "phi": dict(TINY, max_position_embeddings=16, **SPECIAL),
    "bert-generation": dict(TINY, max_position_embeddings=16, is_decoder=True, **SPECIAL),
}  # fmt: skip
MODEL_CLASSES = {
    "t5": T5ForConditionalGeneration,
    "bart": BartForConditionalGeneration,
    "phi": PhiForCausalLM,
    "bert-generation": BertGenerationDecoder,
}
ADAPTERS_HOSTS = ("bert", "roberta", "t5", "gpt2")
PEFT_ONLY_HOSTS = ("llama", "distilbert", "phi", "bert-generation")
PEFT_HOSTS = (*ADAPTERS_HOSTS, *PEFT_ONLY_HOSTS)

# Reduction factors that leave bottlenecks divisible by n = 4 where PHM layers are used: 24 // 3 = 8.
SINGLE_ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "seq_bn": ("seq_bn", {"reduction_factor": 3}),
    "seq_bn_factor_map": ("seq_bn", {"reduction_factor": {"1": 2, "default": 3}}),
    "seq_bn_leave_out": ("seq_bn", {"reduction_factor": 3, "leave_out": [0]}),
    "double_seq_bn": ("double_seq_bn", {"reduction_factor": 3}),
    "par_bn": ("par_bn", {"reduction_factor": 2}),
    "scaled_par_bn": ("scaled_par_bn", {"reduction_factor": 2}),
    "compacter": ("compacter", {"reduction_factor": 3}),
    "compacter++": ("compacter++", {"reduction_factor": 3}),
    "lora": ("lora", {"r": 4, "alpha": 16}),
}
# Prefixes, IA3 and UniPELT. In T5 their prefixes move relative positions; in decoders their gates read half a text.
WAYS: dict[str, tuple[str, ...]] = {
    "bert": ("prefix", "prefix_flat", "prefix_left_out", "ia3", "unipelt", "unipelt_two", "lora_gated", "mam"),
    "roberta": ("prefix", "unipelt"),
    "gpt2": ("prefix", "prefix_flat", "ia3", "unipelt"),
    "t5": ("prefix_flat", "ia3"),
    "bart": ("prefix", "prefix_flat", "prefix_no_cross", "ia3"),
}
STACKS = {"stack": "seq_bn", "stack_double": "double_seq_bn"}
FUSIONS = [(2, "dynamic"), (3, "dynamic"), (5, "dynamic"), (2, "static"), (5, "static")]
MEMBER_FACTORS = (3, 3, 2, 4, 6)  # two members are alike, three and five are not
# Cases with a head of the library: which, and its layers. Four labels, of the text or every token; questions have two,
# and the three texts of the inputs are the choices of one row.
HEADS = {
    "seq_bn_head1": ("classification", 1), "seq_bn_head2": ("classification", 2),
    "seq_bn_tagging": ("tagging", 2), "seq_bn_question": ("qa", 1),
    "seq_bn_choice": ("multiple_choice", 2),
}  # fmt: skip
# Saving these through T5ForConditionalGeneration, `adapters` 1.3.0 forgets the shared rule; through its own class, not.
OWN_CLASS = [("t5", "compacter"), ("t5", "compacter++"), *((h, c) for h in ("bert", "roberta") for c in HEADS)]

QUERY_VALUE = {
    "bert": ["query", "value"],
    "roberta": ["query", "value"],
    "t5": ["q", "v"],
    "gpt2": ["c_attn"],
    "llama": ["q_proj", "v_proj"],
}
# One projection of the last layer, as a key of peft's `rank_pattern`: the end of a module's path, or a regex for it.
LAST_VALUE = {
    "bert": r"layer\.1\..*value",
    "roberta": "layer.1.attention.self.value",
    "t5": "decoder.block.1.layer.0.SelfAttention.v",
    "gpt2": "h.1.attn.c_attn",
    "llama": "layers.1.self_attn.v_proj",
}
# Cases that the other hosts cannot have.
SPECIAL_CASES: dict[str, dict[str, dict[str, Any]]] = {
    # Saves pre_classifier too: its name ends with `classifier`.
    "distilbert": {"head": {"r": 2, "lora_alpha": 8, "target_modules": ["q_lin", "v_lin"], "task_type": "SEQ_CLS"}},
    # Writes the output layer's own weight and bias beside its LoRA.
    "phi": {"lm_head": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}},
    # The bias of the output layer has two names.
    "bert-generation": {"bias_all": {"r": 2, "lora_alpha": 8, "target_modules": ["query", "value"], "bias": "all"}},
}
PATTERNS = {
    "bert": r".*\.attention\.(self\.(query|value)|output\.dense)",
    "t5": r"(encoder|decoder)\.block\.\d+\.layer\.0\..*\.(q|v)$",
}


# --- hosts, inputs and random weights ---------------------------------------------------------------------------------


def randomise(parameters: Iterable[tuple[str, nn.Parameter]], what: str, std: float = SPREAD) -> None:
    """Draw every parameter at a size that shows in the logits. The seed is `what` they are, in words."""
    generator = torch.Generator().manual_seed(zlib.crc32(what.encode()))
    for name, parameter in sorted(parameters):
        noise = spread(name, std) * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + noise if is_multiplier(name) else noise)


def spread(name: str, std: float) -> float:
    """The standard deviation to draw a parameter with, mostly `std`."""
    if "adapter_fusion_layer" in name and ("query" in name or "key" in name):
        return 0.06  # the scores are not divided by sqrt(D): more would make every softmax one-hot
    if any(part in name for part in ("W_left", "W_right", "phm_rule")):
        return 0.6  # three such factors are multiplied to make one weight
    if "lora_" in name:
        return 0.15  # times alpha / r = 4, the product of two such factors is as large as the host's weights
    return std


def is_multiplier(name: str) -> bool:
    """Whether a parameter is the weight of a layer norm or a learned scale, whose neutral value is one."""
    owner, _, leaf = name.rpartition(".")
    is_norm = any(part in owner.rpartition(".")[2].lower() for part in ("norm", "ln_"))
    return leaf == "scaling" or (is_norm and leaf == "weight")


def make_host(host: str) -> None:
    """Save a random host, its inputs, and its logits."""
    config = AutoConfig.for_model(host, vocab_size=VOCAB, **HOSTS[host])
    model = MODEL_CLASSES[host](config) if host in MODEL_CLASSES else SequenceClassifier.from_config(config)
    randomise(model.named_parameters(), f"{host} host", HOST_SPREAD)
    if host == "bart":
        model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(fresh_folder(f"{host}/host"))

    generator = torch.Generator().manual_seed(zlib.crc32(f"{host} inputs".encode()))
    attention_mask = (torch.arange(T) < torch.tensor(ROW_LENGTHS)[:, None]).long()  # (B, T), padding on the right
    input_ids = torch.randint(FIRST_WORD, VOCAB, (B, T), generator=generator)
    inputs = {"input_ids": input_ids.where(attention_mask == 1, config.pad_token_id), "attention_mask": attention_mask}
    if host in ("t5", "bart"):
        decoder_input_ids = torch.randint(FIRST_WORD, VOCAB, (B, T_DECODER), generator=generator)
        decoder_input_ids[:, 0] = config.decoder_start_token_id
        inputs["decoder_input_ids"] = decoder_input_ids
    save_file({**inputs, "bare": logits_of(load_host(host), inputs)}, f"{host}/inputs.safetensors")


def load_host(host: str) -> PreTrainedModel:
    """The saved host. Paths are relative to tests/golden, since both libraries write them into their files."""
    return MODEL_CLASSES.get(host, SequenceClassifier).from_pretrained(f"{host}/host").eval()


def load_inputs(host: str) -> tuple[dict[str, Tensor], Tensor]:
    """The host's inputs, and the logits of the bare host on them."""
    inputs = load_file(f"{host}/inputs.safetensors")
    bare = inputs.pop("bare")
    return inputs, bare


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """(B, labels), for T5 (B, T_DECODER, VOCAB), for heads that read every token (B, T, outputs)."""
    with torch.no_grad():
        said = model.eval()(**inputs)
    return said.logits.contiguous() if "logits" in said else torch.stack([said.start_logits, said.end_logits], -1)


def fresh_folder(folder: str) -> str:
    """Make an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    return folder


def check_different(logits: Tensor, bare: Tensor, folder: str) -> None:
    """A case that does not move the logits would test nothing."""
    distance = (logits - bare).abs().max().item()
    print(f"{folder:32} max |logits - bare| = {distance:.3f}")
    assert distance > CLEARLY_DIFFERENT, folder


# --- adapters ---------------------------------------------------------------------------------------------------------


def make_adapters_files() -> None:
    """All cases of the `adapters` library."""
    from adapters import AdapterConfig
    from adapters.composition import Average, Fuse, Stack

    def members_of(names: Iterable[str], kind: str) -> dict[str, AdapterConfig]:
        return {n: AdapterConfig.load(kind, reduction_factor=f) for n, f in zip(names, MEMBER_FACTORS, strict=False)}

    for host in ADAPTERS_HOSTS:
        make_host(host)
        for case, (kind, options) in SINGLE_ADAPTERS.items():
            make_adapters_case(host, case, {"a": AdapterConfig.load(kind, **options)}, Stack("a"))
        for case, kind in STACKS.items():
            make_adapters_case(host, case, members_of(("first", "second"), kind), Stack("first", "second"))
        for count, fusion in FUSIONS:
            names = [f"m{i}" for i in range(count)]
            case = f"fusion{count}_{fusion}"
            make_adapters_case(host, case, members_of(names, "seq_bn"), Fuse(*names), fusion=fusion)

    make_host("bart")
    for host, cases in WAYS.items():
        for case in cases:
            pooled = case not in ("ia3", "lora_gated")  # one tensor under many names, which safetensors refuses there
            make_adapters_case(host, case, {"a": way_of(case)}, Stack("a"), use_safetensors=not pooled)

    one = members_of("a", "seq_bn")
    make_adapters_case("bert", "seq_bn_bin", one, Stack("a"), use_safetensors=False)
    for host in ("bert", "roberta"):
        make_adapters_case(host, "seq_bn_host_head", one, Stack("a"), with_head=True)
        for case in HEADS:
            make_adapters_case(host, case, one, Stack("a"), with_head=True)
    make_adapters_setup("bert", "setup", members_of(("first", "m0", "m1"), "seq_bn"), Stack("first", Fuse("m0", "m1")))

    make_adapters_case("bart", "seq_bn_host_head", one, Stack("a"), with_head=True)
    make_adapters_case("bert", "fusion1_dynamic", members_of(["m0"], "seq_bn"), Fuse("m0"))
    make_adapters_setup("bert", "setup_fuse_one", members_of(["m0"], "seq_bn"), Fuse("m0"))
    # Setups that mean something else there than inlay.Stack and inlay.Average.
    pair = members_of(("first", "second"), "seq_bn")
    parallel, lora = AdapterConfig.load("par_bn", reduction_factor=3), AdapterConfig.load("lora", r=2, alpha=4)
    refused = {
        "parallel_first": Stack("parallel", "second"),
        "parallel_last": Stack("first", "parallel"),
        "loras": Stack("lora", "other_lora"),
        "average": Average("first", "second"),
    }
    everybody = {**pair, "parallel": parallel, "lora": lora, "other_lora": lora}
    for case, setup in refused.items():
        make_adapters_setup("bert", f"setup_{case}", {name: everybody[name] for name in setup.flatten()}, setup)


def way_of(case: str) -> Any:
    """The config of a prefix, of IA3, or of a union of them."""
    from adapters import ConfigUnion, IA3Config, LoRAConfig, ParBnConfig, PrefixTuningConfig, SeqBnConfig, UniPELTConfig

    prefix, flat = (PrefixTuningConfig(prefix_length=4, bottleneck_size=6, flat=flat) for flat in (False, True))
    adapter, lora = SeqBnConfig(reduction_factor=3), LoRAConfig(r=4, alpha=2)
    made = {
        "prefix": prefix,
        "prefix_flat": flat,
        "prefix_left_out": prefix.replace(leave_out=[0]),
        "prefix_no_cross": flat.replace(cross_prefix=False),
        "ia3": IA3Config(),
        "unipelt": UniPELTConfig(prefix, adapter, lora),
        "unipelt_two": UniPELTConfig(
            flat.replace(shared_gating=False), adapter, lora.replace(attn_matrices=["q", "k"])
        ),
        "lora_gated": lora.replace(use_gating=True),
        "mam": ConfigUnion(prefix, ParBnConfig(reduction_factor=2)),
    }
    return made[case]


def load_adapters_host(host: str, case: str) -> PreTrainedModel:
    """The host made ready for adapters, or the library's own class with the host's weights in it."""
    import adapters

    if (host, case) in OWN_CLASS:
        return adapters.AutoAdapterModel.from_pretrained(f"{host}/host").eval()
    model = load_host(host)
    if case in WAYS.get(host, ()):  # where the mask is boolean, as sdpa's in GPT-2, their prefixes are masked away
        model.set_attn_implementation("eager")
    adapters.init(model)
    return model


def make_adapters_case(
    host: str,
    case: str,
    members: dict[str, Any],
    setup: Any,
    *,
    fusion: str = "dynamic",
    with_head: bool = False,
    use_safetensors: bool = True,
) -> None:
    """Add random adapters to a host, save them, and save what the host then computes."""
    folder = fresh_folder(f"{host}/{case}")
    inputs, bare = load_inputs(host)
    model = load_adapters_host(host, case)
    add_random_adapters(model, members, setup, fusion, with_head, HEADS.get(case), folder)
    if case in HEADS:  # four labels, so `bare` is this head on the host without the adapter
        model.set_active_adapters(None)
        bare = logits_of(model, inputs)
        model.set_active_adapters(setup)

    alone = len(members) == 1 and not find_fuse(setup)
    folders = {name: folder if alone else f"{folder}/{name}" for name in members}
    saving = {"with_head": with_head, "use_safetensors": use_safetensors}
    for name, path in folders.items():
        model.save_adapter(path, name, **saving)
    if fuse := find_fuse(setup):
        model.save_adapter_fusion(f"{folder}/fusion", fuse, **saving)

    expected = adapters_outputs(model, inputs, setup)
    check_different(expected["logits"], bare, folder)
    save_file(expected, f"{folder}/expected.safetensors")

    again = load_adapters_host(host, case)
    for path in folders.values():
        again.load_adapter(path, **saving)
    if fuse:
        again.load_adapter_fusion(f"{folder}/fusion", **saving)
    again.set_active_adapters(setup)
    assert torch.equal(logits_of(again, inputs), expected["logits"]), f"{folder} does not survive loading"


def make_adapters_setup(host: str, case: str, members: dict[str, Any], setup: Any) -> None:
    """A whole setup in the library's format for setups, with the host's head: see `adapter_setup.json`."""
    folder = fresh_folder(f"{host}/{case}")
    inputs, bare = load_inputs(host)
    model = load_adapters_host(host, case)
    add_random_adapters(model, members, setup, "dynamic", True, None, folder)
    model.save_adapter_setup(folder, setup, head_setup=True, use_safetensors=True)
    expected = adapters_outputs(model, inputs, setup)
    check_different(expected["logits"], bare, folder)
    save_file(expected, f"{folder}/expected.safetensors")

    again = load_adapters_host(host, case)
    again.load_adapter_setup(folder, set_active=True, use_safetensors=True)
    assert torch.equal(logits_of(again, inputs), expected["logits"]), f"{folder} does not survive loading"


def add_random_adapters(
    model: Any,
    members: dict[str, Any],
    setup: Any,
    fusion: str,
    with_head: bool,
    head: tuple[str, int] | None,
    seed: str,
) -> None:
    """Add adapters, their fusion and a head; make them random and active. The host's own tensors stay as they are."""
    own = {name for name, _ in model.named_parameters() if not (with_head and name.startswith("classifier."))}
    for name, config in members.items():
        model.add_adapter(name, config=config)
    if fuse := find_fuse(setup):
        model.add_adapter_fusion(fuse, fusion)
    if head:
        kind, layers = head
        size = {"qa": {"num_labels": 2}, "multiple_choice": {"num_choices": 3}}.get(kind, {"num_labels": 4})
        getattr(model, f"add_{kind}_head")("a", **size, layers=layers)
    model.set_active_adapters(setup)
    randomise([(n, p) for n, p in model.named_parameters() if n not in own], seed)


def find_fuse(setup: Any) -> Any | None:
    """The fusion in a setup, which is the setup itself or one of its parts."""
    from adapters.composition import Fuse

    return next((block for block in (setup, *setup) if isinstance(block, Fuse)), None)


def adapters_outputs(model: Any, inputs: dict[str, Tensor], setup: Any) -> dict[str, Tensor]:
    """The logits, and for a fusion its attention over the members at each layer and site."""
    expected = {"logits": logits_of(model, inputs)}
    if fuse := find_fuse(setup):
        with torch.no_grad():
            outputs = model(**inputs, output_adapter_fusion_attentions=True)
        for layer, sites in outputs.adapter_fusion_attentions[fuse.name].items():
            for site, attention in sites.items():
                expected[f"attention.{layer}.{site}"] = torch.tensor(attention)  # (B, T, N)
    return expected


# --- peft -------------------------------------------------------------------------------------------------------------


def make_peft_files() -> None:
    """All cases of the `peft` library."""
    for host in PEFT_ONLY_HOSTS:
        make_host(host)
    for host in PEFT_HOSTS:
        inputs, bare = load_inputs(host)
        torch.testing.assert_close(logits_of(load_host(host), inputs), bare, atol=1e-6, rtol=1e-6)
        for case, options in peft_cases(host).items():
            make_peft_case(host, f"peft_{case}", options)
    make_peft_ways()


def make_peft_ways() -> None:
    """Prompts, prefixes and IA3, where peft computes what Inlay does."""
    from peft import IA3Config, PrefixTuningConfig, PromptTuningConfig

    length = {"num_virtual_tokens": 4}
    bert_ia3 = {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]}
    make_peft_case("bert", "peft_ia3", {"task_type": "SEQ_CLS", **bert_ia3}, IA3Config)
    make_peft_case("bert", "peft_prefix", {"task_type": "SEQ_CLS", **length}, PrefixTuningConfig)
    make_peft_case("gpt2", "peft_ia3", {"task_type": "SEQ_CLS"}, IA3Config)
    projected = {"prefix_projection": True, "encoder_hidden_size": 6}
    make_peft_case("gpt2", "peft_prefix", {"task_type": "SEQ_CLS", **length, **projected}, PrefixTuningConfig)
    make_peft_case("t5", "peft_ia3", {"task_type": "SEQ_2_SEQ_LM"}, IA3Config)
    make_peft_case("t5", "peft_prompt", {"task_type": "SEQ_2_SEQ_LM", **length}, PromptTuningConfig)
    make_peft_case("phi", "peft_prompt", {"task_type": "CAUSAL_LM", **length}, PromptTuningConfig)


def peft_cases(host: str) -> dict[str, dict[str, Any]]:
    """The options of each LoRA case for a host."""
    if host in SPECIAL_CASES:
        return SPECIAL_CASES[host]
    targets = QUERY_VALUE[host]
    common = {"r": 4, "lora_alpha": 16, "target_modules": targets, "fan_in_fan_out": host == "gpt2"}
    cases = {
        "qv": common,
        "all_linear": {**common, "target_modules": "all-linear"},
        "rslora": {**common, "use_rslora": True},
        "patterns": {**common, "rank_pattern": {LAST_VALUE[host]: 2}, "alpha_pattern": {targets[0]: 4}},
    }
    if host in ("bert", "roberta", "gpt2"):  # T5 and Llama have no biases
        cases["bias_lora_only"] = {**common, "bias": "lora_only"}
        cases["bias_all"] = {**common, "bias": "all"}
    if host != "t5":
        cases["head"] = {**common, "task_type": "SEQ_CLS"}  # saves the host's head too: `classifier` or `score`
    if host in PATTERNS:
        cases["regex"] = {**common, "target_modules": PATTERNS[host], "exclude_modules": r".*\.1\..*(query|q)"}
    if host == "bert":
        cases["layers"] = {**common, "layers_to_transform": [1], "exclude_modules": ["self.value"]}
        # The pooler stays the host's own, with a LoRA or a trained bias, below a classifier that is saved.
        cases["head_all_linear"] = {**common, "target_modules": "all-linear", "task_type": "SEQ_CLS"}
        cases["head_bias_all"] = {**common, "bias": "all", "task_type": "SEQ_CLS"}
    return cases


def make_peft_case(host: str, case: str, options: dict[str, Any], kind: Any = None) -> None:
    """Add a random LoRA, or another kind of change, to a host, save it, and save what the host then computes."""
    from peft import LoraConfig, PeftModel, get_peft_model

    folder = fresh_folder(f"{host}/{case}")
    inputs, bare = load_inputs(host)
    model = get_peft_model(load_host(host), (kind or LoraConfig)(**options))
    randomise([(n, p) for n, p in model.named_parameters() if p.requires_grad], folder)
    config = model.peft_config["default"]
    for name in ("target_modules", "exclude_modules", "feedforward_modules"):
        if isinstance(names := getattr(config, name, None), set):  # would be written in another order each time
            setattr(config, name, sorted(names))
    model.save_pretrained(folder)
    Path(folder, "README.md").unlink()  # an empty model card

    whole = logits_of(model, inputs)
    expected = whole[:, -bare.shape[1] :].contiguous() if whole.dim() == 3 else whole  # without those of a prompt
    check_different(expected, bare, folder)
    save_file({"logits": expected}, f"{folder}/expected.safetensors")
    again = PeftModel.from_pretrained(load_host(host), folder)
    assert torch.equal(logits_of(again, inputs), whole), f"{folder} does not survive loading"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=["adapters", "peft"])
    make_files = {"adapters": make_adapters_files, "peft": make_peft_files}[parser.parse_args().library]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    os.chdir(GOLDEN)
    make_files()


if __name__ == "__main__":
    main()
