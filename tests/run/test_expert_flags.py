"""Flags of experts: what they become, and which of them make no mixture."""

import pytest
import torch
from command_lines import with_flags

from megatron.layers.experts.capacity import Capacity
from megatron.layers.mlp import QuickGeGLU
from megatron.layers.site import Site
from megatron.model.parts import build_mlp
from megatron.model.settings import ModelSettings
from megatron.run.command_line import parse

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 999 --mock-data --device cpu --bf16 --dry-run --disable-bias-linear "
    "--num-experts 8"
)


def model(flags: str) -> ModelSettings:
    return parse(with_flags(BASE.split(), flags.split()), 1).model


def notes(flags: str) -> str:
    return "\n".join(parse(with_flags(BASE.split(), flags.split()), 1).notes)


def refusal(flags: str) -> str:
    with pytest.raises(ValueError, match="--") as caught:
        parse(with_flags(BASE.split(), flags.split()), 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("1", (1, 1, 1, 1)),
        ("2", (1, 0, 1, 0)),
        ("4", (1, 0, 0, 0)),
        ("([0]*1+[1]*3)", (0, 1, 1, 1)),
        ("[1,0,0,1]", (1, 0, 0, 1)),
    ],
)
def test_layers_with_experts_are_those_of_megatron(words: str, pattern: tuple[int, ...]) -> None:
    found = model(f"--moe-layer-freq {words}")
    assert tuple(int(found.experts.in_layer(layer)) for layer in range(4)) == pattern


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", "even"),
        ("--moe-layer-freq 2", "cost"),
        ("--moe-layer-freq [0]*3+[1]*1", "cost"),
        ("--moe-layer-freq 2 --layer-distribution even", "even"),
        ("--moe-layer-freq 2 --layer-distribution remainder", "remainder"),
        ("--moe-layer-freq 2 --vocab-parallel redis", "redis"),
        ("--moe-layer-freq 2 --decoder-first-pipeline-num-layers 1", "even"),
        ("--moe-layer-freq 2 --pipeline-model-parallel-layout Ett|ttL", "explicit"),
        ("--moe-layer-freq 2 --num-layers-per-virtual-pipeline-stage 1", "even"),
        ("--num-experts 1 --moe-layer-freq 2", "even"),
    ],
)
def test_layers_of_two_kinds_are_spread_by_cost_unless_a_flag_spreads_them(
    flags: str, kind: str
) -> None:
    given = with_flags(BASE.split(), f"--pipeline-model-parallel-size 2 {flags}".split())
    found = parse(given, 2)
    assert found.parallel.layers.kind == kind
    assert ("layers of equal cost" in "\n".join(found.notes)) == (kind == "cost")


def test_a_group_has_as_many_experts_as_make_it_good() -> None:
    groups = "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4"
    assert model(f"{groups} --moe-router-group-best 1").experts.moe_router_group_best == 1
    told = refusal(f"{groups} --moe-router-group-best 3")
    assert "--moe-router-group-best 3 is more than the 2 experts" in told


def test_an_expert_is_as_wide_as_the_mlp_unless_it_is_said() -> None:
    assert model("").experts.moe_ffn_hidden_size == model("").mlp.ffn_hidden_size
    assert model("--moe-ffn-hidden-size 96").experts.moe_ffn_hidden_size == 96


def test_weight_gradients_are_delayed_behind_pairs_only() -> None:
    spread = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    pairs = f"{spread} --overlap-moe-expert-parallel-comm"
    found = {
        flags: parse(with_flags(BASE.split(), flags.split()), 2)
        for flags in (pairs, f"{pairs} --delay-wgrad-compute", f"{spread} --delay-wgrad-compute")
    }
    assert [run.parallel.pairs.delay_wgrad_compute for run in found.values()] == [
        False,
        True,
        False,
    ]
    assert [
        "--delay-wgrad-compute changes nothing" in "\n".join(run.notes) for run in found.values()
    ] == [False, False, True]


def test_every_flag_reaches_the_model() -> None:
    found = model(
        "--moe-router-topk 4 --moe-router-score-function sigmoid --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-aux-loss-coeff 0.01 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 0.001 "
        "--moe-router-dtype fp32 --moe-shared-expert-intermediate-size 48 "
        "--moe-shared-expert-gate"
    )
    own = found.experts
    assert (own.num_experts, own.moe_router_topk) == (8, 4)
    assert own.moe_router_score_function == "sigmoid"
    assert (own.moe_router_num_groups, own.moe_router_group_topk) == (4, 2)
    assert (own.moe_router_topk_scaling_factor, own.dtype) == (2.5, torch.float32)
    assert (own.moe_shared_expert_intermediate_size, own.moe_shared_expert_gate) == (48, True)
    assert found.balance.coefficients == (("seq_aux_loss", 0.01),)
    assert found.balance.moe_z_loss_coeff == 0.001


def test_several_losses_may_balance_with_a_coefficient_each() -> None:
    found = model(
        "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 0.01 0.001"
    )
    assert found.balance.losses == {"aux_loss": 0.01, "global_aux_loss": 0.001}


def test_the_flags_of_balance_reach_the_router() -> None:
    balance = model(
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 0.01 --moe-router-force-load-balancing "
        "--moe-input-jitter-eps 0.125 --moe-expert-capacity-factor 1.5 "
        "--moe-token-drop-policy position"
    ).balance
    assert balance.moe_router_enable_expert_bias
    assert (balance.moe_router_bias_update_rate, balance.moe_input_jitter_eps) == (0.01, 0.125)
    assert balance.moe_router_force_load_balancing
    assert balance.capacity == Capacity(1.5, "position")
    plain = model("").balance
    assert not plain.moe_router_enable_expert_bias
    assert not plain.moe_router_force_load_balancing
    assert (plain.moe_input_jitter_eps, plain.capacity) == (0.0, None)


def test_one_expert_of_a_token_may_be_chosen_by_sinkhorn() -> None:
    found = model("--moe-router-topk 1 --moe-router-load-balancing-type sinkhorn")
    assert found.balance.is_by_sinkhorn


def test_recomputed_mixtures_have_an_older_name() -> None:
    words = with_flags(BASE.split(), ["--moe-layer-recompute"])
    assert parse(words, 1).train.recomputation.parts == {"moe"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--moe-router-topk 9", "more than --num-experts 8"),
        ("--moe-router-topk 0", "at least 1"),
        ("--moe-router-topk 1", "add --moe-router-pre-softmax"),
        ("--moe-layer-freq [0,0,0,0]", "gives no layer experts"),
        ("--moe-use-upcycling", "add --load"),
        (
            "--moe-use-upcycling --load there --moe-upcycling-granularity 3",
            "does not divide --num-experts 8 and --moe-router-topk 2",
        ),
        (
            "--moe-use-upcycling --load there --moe-shared-expert-intermediate-size 32",
            "has no shared expert to begin with",
        ),
        ("--tensor-model-parallel-size 2", "add --sequence-parallel"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 1", "does not divide --num-experts 8"),
        (
            "--moe-router-num-groups 2 --moe-router-group-topk 4",
            "more than --moe-router-num",
        ),
        (
            "--moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2",
            "choose a multiple of 2, up to 4",
        ),
        (
            "--moe-router-topk 4 --moe-router-num-groups 8 --moe-router-group-topk 2",
            "groups of 1 experts",
        ),
        ("--moe-router-num-groups 4", "--moe-router-group-topk"),
        ("--moe-layer-freq [1,0]", "2 entries for 4 layers"),
        ("--moe-layer-freq 5", "beyond the last of 4 layers"),
        ("--expert-model-parallel-size 2", "the 1 rank of a stage"),
        ("--expert-tensor-parallel-size 2", "groups of 2; lower one of the two"),
        ("--expert-model-parallel-size 3", "does not divide --num-experts 8"),
        ("--expert-tensor-parallel-size 3 --moe-ffn-hidden-size 32", "--moe-ffn-hidden-size 32"),
        ("--moe-shared-expert-gate", "--moe-shared-expert-intermediate-size"),
        ("--moe-aux-loss-coeff nan", "at least 0 and at most 1,000"),
        (
            "--optimizer muon --expert-tensor-parallel-size 2",
            "take --expert-tensor-parallel-size 1",
        ),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "use --fp8-recipe blockwise"),
        ("--bf16 --fp8-format e4m3 --moe-ffn-hidden-size 24", "--moe-ffn-hidden-size makes 24"),
        (
            "--bf16 --fp8-format e4m3 --moe-shared-expert-intermediate-size 24",
            "--moe-shared-expert-intermediate-size makes 24",
        ),
        ("--moe-expert-capacity-factor 0", "at least 0.01"),
        ("--moe-expert-capacity-factor -1", "at least 0.01"),
        ("--moe-token-drop-policy last", "choose one of probs, position"),
        ("--moe-input-jitter-eps 1", "at least 0 and at most 0.999999"),
        ("--moe-router-enable-expert-bias", "take --moe-router-score-function sigmoid"),
        (
            "--moe-router-enable-expert-bias --moe-router-load-balancing-type sinkhorn",
            "both balance the choices",
        ),
        ("--moe-router-load-balancing-type fair", "choose one of"),
        ("--moe-router-load-balancing-type aux_loss aux_loss", "stands there twice"),
        ("--moe-router-load-balancing-type aux_loss none", "only losses stand together"),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1",
            "as many numbers as types, 2",
        ),
        ("--moe-aux-loss-coeff 0.1 0.2", "as many numbers as types, 1"),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
            "have no balancing loss",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1",
            "leave one of the two out",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-router-num-groups 4 "
            "--moe-router-group-topk 2",
            "balanced over all experts",
        ),
        ("--moe-router-topk-limited-devices 2", "use --moe-router-num-groups"),
        ("--moe-extended-tp", "has only what --help lists"),
        ("--recompute-activations --recompute-modules shared_experts", "take moe"),
        ("--tensor-model-parallel-size 2 --moe-ffn-hidden-size 33", "--moe-ffn-hidden-size 33"),
    ],
)
def test_what_makes_no_mixture_is_refused(flags: str, words: str) -> None:
    assert words in refusal(flags)


def test_experts_and_routers_have_biases_like_other_layers() -> None:
    words = [word for word in BASE.split() if word != "--disable-bias-linear"]
    for own, has_biases in ((parse(words, 1).model, True), (model(""), False)):
        layer = build_mlp(own, 0, Site(torch.device("meta"), torch.float32))
        names = {name for name, _ in layer.named_parameters()}
        assert ({"router.bias", "experts.linear_fc1.bias"} <= names) == has_biases


def test_a_clamped_gate_needs_the_function_that_clamps() -> None:
    clamped = "--activation-func-clamp-value 7 --glu-linear-offset 1"
    assert model(f"--quick-geglu {clamped}").mlp.function == QuickGeGLU(7.0, 1.0)
    assert "add --quick-geglu" in refusal(clamped)
    assert "--swiglu" in refusal("--quick-geglu --swiglu")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--moe-grouped-gemm", "multiplied at once anyway; --moe-grouped-products says by what"),
        (
            "--moe-grouped-products grouped_gemm --fp8-format hybrid --fp8-recipe tensorwise",
            "--moe-grouped-products grouped_gemm changes nothing beside --fp8-format",
        ),
        ("--moe-token-dispatcher-type alltoall", "no expert is on another rank"),
        ("--moe-router-load-balancing-type seq_aux_loss", "without --moe-aux-loss-coeff"),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", "at --moe-router-load"),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-router-score-function sigmoid",
            "scores of its own",
        ),
        ("--moe-router-bias-update-rate 0.1", "without --moe-router-enable-expert-bias"),
        ("--moe-token-drop-policy position", "without --moe-expert-capacity-factor"),
        ("--moe-pad-expert-input-to-capacity", "without padding"),
        ("--disable-moe-token-dropping", "takes all tokens that choose it"),
        ("--moe-router-fusion", "implementation choice"),
        ("--moe-router-padding-for-fp8", "any number of tokens"),
        ("--moe-router-padding-for-quantization", "any number of tokens"),
        ("--num-experts 1", "every token passes the same layers"),
        ("--num-experts 1 --moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff changes nothing at"),
        (
            "--num-experts 1 --moe-expert-capacity-factor 2 --moe-token-drop-policy position",
            "--moe-token-drop-policy changes nothing at",
        ),
        ("--num-experts 1 --delay-wgrad-compute", "--delay-wgrad-compute changes nothing w"),
        ("--num-experts 1 --moe-ffn-hidden-size 9", "--moe-ffn-hidden-size changes nothing at"),
        ("--cuda-graph-impl local --moe-input-jitter-eps 0.1", "jitter-eps anew in every pass"),
        ("--recompute-activations --recompute-modules moe moe_act", "beside moe"),
        (
            "--num-experts 1 --recompute-activations --recompute-modules moe",
            "without --num-experts",
        ),
    ],
)
def test_what_changes_nothing_is_noted(flags: str, words: str) -> None:
    assert words in notes(flags)


def test_without_experts_their_flags_change_nothing() -> None:
    words = BASE.replace(" --num-experts 8", "").split()
    found = parse([*words, "--moe-router-topk", "4", "--moe-expert-capacity-factor", "2"], 1)
    assert found.model.experts.num_experts == 0
    assert found.model == parse(words, 1).model
    assert sum("changes nothing" in note for note in found.notes) == 2
