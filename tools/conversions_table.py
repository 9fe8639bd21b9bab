#!/usr/bin/env python3
"""Measure how far converted models are from their originals, and write it to docs/hugging-face.md.

python tools/conversions_table.py

Of every family a small random model is made with transformers, imported, run by our own program,
exported, and loaded in transformers again. All is fp32 on a CPU. It needs the package transformers.
"""

import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from megatron.checkpoint.choose import choose
from megatron.commands.convert_checkpoint import main as convert
from megatron.inference.model import InferenceModel
from megatron.parallel.grid import Grid
from megatron.parallel.groups import make_groups
from tools.pages.tables import row, rule

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "hugging-face.md"
BEGIN: Final = "<!-- written by tools/conversions_table.py -->"
END: Final = "<!-- end -->"

_EAGER: Final = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Attention and experts in plain PyTorch, which takes any width."""

VOCABULARY: Final = 99
"""Entries of the vocabulary: a number that the usual numbers of ranks do not divide."""

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA_3: Final = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN: Final = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}

_DEEPSEEK: Final[dict[str, Any]] = _SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 9,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}

_GPT_OSS_YARN: Final = {
    "rope_type": "yarn",
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}

_LONGROPE: Final = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}

_V3_EXPERTS: Final[dict[str, Any]] = _SIZES | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.0,
}

_FALCON: Final[dict[str, Any]] = {
    name: _SIZES[name]
    for name in _SIZES
    if name not in ("num_key_value_heads", "intermediate_size")
}

CONFIGS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gpt2": (
        "GPT2Config",
        {
            **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4},
            **{"n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "llama 2": ("LlamaConfig", _SIZES),
    "llama 3": (
        "LlamaConfig",
        _SIZES
        | {"tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": _LLAMA_3}
        | {"max_position_embeddings": 10000, "head_dim": 16},
    ),
    "llama, dynamic": (
        "LlamaConfig",
        _SIZES
        | {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", _SIZES | {"head_dim": 16, "sliding_window": 7}),
    "qwen 2": (
        "Qwen2Config",
        _SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen 3": ("Qwen3Config", _SIZES | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen 3, yarn": (
        "Qwen3Config",
        _SIZES | {"head_dim": 16, "rope_scaling": _YARN},
    ),
    "mixtral": (
        "MixtralConfig",
        _SIZES | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen 2 moe": (
        "Qwen2MoeConfig",
        _SIZES
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen 3 moe": (
        "Qwen3MoeConfig",
        _SIZES
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"moe_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "olmoe": (
        "OlmoeConfig",
        _SIZES | {"num_experts": 8, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.02},
    ),
    "deepseek v2": (
        "DeepseekV2Config",
        _DEEPSEEK
        | {"q_lora_rank": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
        | {"n_routed_experts": 16},
    ),
    "deepseek v2 lite": (
        "DeepseekV2Config",
        _DEEPSEEK
        | {"q_lora_rank": None, "num_experts_per_tok": 3}
        | {"rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek v3": (
        "DeepseekV3Config",
        _DEEPSEEK
        | {"q_lora_rank": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
        | {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "moonlight": (
        "DeepseekV3Config",
        _DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
        | {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446, "rope_theta": 50000.0},
    ),
    "gpt-oss": (
        "GptOssConfig",
        _SIZES
        | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}
        | {"swiglu_limit": 1.5, "rope_scaling": _GPT_OSS_YARN, "rope_theta": 10000.0},
    ),
    "gemma": ("GemmaConfig", _SIZES | {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma 2": (
        "Gemma2Config",
        _SIZES
        | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma 3": (
        "Gemma3TextConfig",
        _SIZES
        | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
        | {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "qwen 3, biases of attention": (
        "Qwen3Config",
        _SIZES | {"head_dim": 16, "attention_bias": True},
    ),
    "llama, biases of attention": ("LlamaConfig", _SIZES | {"attention_bias": True}),
    "olmo 2": ("Olmo2Config", _SIZES),
    "olmo 3": (
        "Olmo3Config",
        _SIZES
        | {"sliding_window": 7, "attention_bias": True}
        | {
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": {"rope_theta": 500.0}}
        },
    ),
    "phi 3": (
        "Phi3Config",
        _SIZES
        | {"hidden_size": 64, "sliding_window": 7, "pad_token_id": None}
        | {"partial_rotary_factor": 0.5},
    ),
    "phi 4 mini, longrope": (
        "Phi3Config",
        _SIZES
        | {"hidden_size": 64, "original_max_position_embeddings": 16, "pad_token_id": None}
        | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "rope_scaling": _LONGROPE},
    ),
    "gpt-neox": (
        "GPTNeoXConfig",
        {name: _SIZES[name] for name in _SIZES if name != "num_key_value_heads"}
        | {"hidden_size": 64, "rotary_pct": 0.5, "rotary_emb_base": 1000},
    ),
    "gpt-neox, branches in turn": (
        "GPTNeoXConfig",
        {name: _SIZES[name] for name in _SIZES if name != "num_key_value_heads"}
        | {"use_parallel_residual": False, "hidden_act": "gelu_fast", "rotary_pct": 1.0}
        | {"hidden_size": 64},
    ),
    "granite": (
        "GraniteConfig",
        _SIZES
        | {"embedding_multiplier": 1.5, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
        | {"logits_scaling": 3.0},
    ),
    "smollm 3": (
        "SmolLM3Config",
        _SIZES
        | {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 5}
        | {"pad_token_id": None},
    ),
    "starcoder 2": (
        "Starcoder2Config",
        _SIZES | {"sliding_window": 7, "norm_epsilon": 1e-4, "rope_theta": 999999.4420358813},
    ),
    "opt": (
        "OPTConfig",
        {
            name: _SIZES[name]
            for name in _SIZES
            if name not in ("num_key_value_heads", "intermediate_size")
        }
        | {"ffn_dim": 48, "pad_token_id": 1},
    ),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 3, "n_head": 6}
        | {"bos_token_id": 1, "eos_token_id": 2, "seq_length": 64},
    ),
    "falcon 7b": ("FalconConfig", _FALCON),
    "falcon 40b": (
        "FalconConfig",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    ),
    "falcon, branches in turn": (
        "FalconConfig",
        _FALCON | {"parallel_attn": False, "ffn_hidden_size": 48},
    ),
    "cohere 2": (
        "Cohere2Config",
        _SIZES | {"sliding_window": 7, "sliding_window_pattern": 3, "logit_scale": 0.4},
    ),
    "glm 4": ("GlmConfig", _SIZES | {"head_dim": 16, "pad_token_id": None}),
    "glm 4 0414": (
        "Glm4Config",
        _SIZES | {"head_dim": 16, "partial_rotary_factor": 0.75, "pad_token_id": None},
    ),
    "glm 4.5": (
        "Glm4MoeConfig",
        _V3_EXPERTS
        | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0},
    ),
    "nemotron": ("NemotronConfig", _SIZES | {"head_dim": 16}),
    "granite moe": (
        "GraniteMoeConfig",
        _SIZES
        | {"embedding_multiplier": 1.5, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
        | {"logits_scaling": 3.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "ernie 4.5": ("Ernie4_5Config", _SIZES | {"head_dim": 16, "use_bias": True}),
    "dots.llm1": (
        "Dots1Config",
        _V3_EXPERTS
        | {"norm_topk_prob": True, "sliding_window": 5, "max_window_layers": 2, "n_group": 2},
    ),
    "hunyuan": (
        "HunYuanDenseV1Config",
        _SIZES
        | {"head_dim": 16, "rope_theta": 10000.0}
        | {"rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    "minimax m2": (
        "MiniMaxM2Config",
        _SIZES
        | {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
}
"""The class of the configuration and its fields, by family."""


class Measured(NamedTuple):
    """How far the logits of a family's original and converted models are apart.

    Attributes:
        kind: class of the model in transformers.
        largest: largest absolute value of the original's logits.
        imported: largest difference between our logits and the original's.
        exported: largest difference between the exported model's logits and the original's.
    """

    kind: str
    largest: float
    imported: float
    exported: float


def random_model(family: str) -> Any:
    """Return a model whose parameters are all random, also biases (not 0) and norms (not 1)."""
    kind, values = CONFIGS[family]
    return random_model_of(getattr(transformers, kind)(**values))


def random_model_of(config: Any) -> Any:
    """Return a model of a configuration of ``transformers``, as ``random_model``."""
    model = transformers.AutoModelForCausalLM.from_config(config, **_EAGER)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (1.5 / parameter.shape[1] ** 0.5))
            else:
                parameter.add_(0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def loaded_model(folder: Path) -> Any:
    """Return the model of ``transformers`` in a folder."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, **_EAGER).eval()


@torch.no_grad()
def their_logits(model: Any, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, s, V] of a model of ``transformers``."""
    found: torch.Tensor = model(tokens_bs, use_cache=False, return_dict=True).logits
    return found


def some_tokens(length: int = 20) -> torch.Tensor:
    """Return two samples of tokens [2, length]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (2, length), generator=generator)


def run_logits(where: Path, tokens_bs: torch.Tensor) -> torch.Tensor:
    """Return fp32 logits [b, s, V] of our checkpoint, computed as in tools/generate.py."""
    groups = make_groups(Grid(), torch.device("cpu"), timedelta(seconds=60), (0, 0))
    model = InferenceModel(where, groups, torch.float32, tokens_bs.shape[1])
    rows = model.start(torch.zeros(len(tokens_bs), dtype=torch.int64), tokens_bs.shape[1])
    x_bsh = model.advance(rows, tokens_bs)
    return model.logits(x_bsh.flatten(0, 1)).view(*tokens_bs.shape, -1)


def measure(family: str, folder: Path) -> Measured:
    """Import and export a family's random model, with files in ``folder``."""
    theirs, tokens_bs = random_model(family), some_tokens()
    theirs.save_pretrained(folder / "theirs", max_shard_size="30KB")  # several files
    convert(["import", str(folder / "theirs"), str(folder / "ours"), "--seq-length", "20"])
    convert(["export", str(folder / "ours"), str(folder / "again")])
    wanted, again = their_logits(theirs, tokens_bs), loaded_model(folder / "again")
    assert type(again) is type(theirs), "exported as another family"
    ours = run_logits(choose(folder / "ours", None), tokens_bs)
    return Measured(
        type(theirs).__name__,
        float(wanted.abs().max()),
        float((ours - wanted).abs().max()),
        float((their_logits(again, tokens_bs) - wanted).abs().max()),
    )


def table() -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield f"transformers {transformers.__version__}, PyTorch {torch.__version__.split('+')[0]}:"
    yield ""
    yield "| model | in transformers | largest logit | off when imported | off when exported |"
    yield rule(5, "llr")
    for family in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(family, Path(folder))
        off = (f"{found.imported:.1e}", f"{found.exported:.1e}")
        yield row(family, f"`{found.kind}`", f"{found.largest:.1f}", *off)


def rewritten(text: str, lines: Iterator[str]) -> str:
    """Return a page with ``lines`` in place of the lines between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, "", *lines, "", END]) + after


def main() -> None:
    """Run the command."""
    transformers.utils.logging.set_verbosity_error()
    text = rewritten(PAGE.read_text(encoding="utf-8"), table())
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
