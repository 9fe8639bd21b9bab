"""The scenarios of all predicted pages: models, and jobs that train them, as flags of a dry run."""

from typing import Final, NamedTuple

from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.gpus import GPUS

GPT: Final = "GPT, h = 4096"
MIXTRAL: Final = "Mixtral 8x7B"
QWEN: Final = "Qwen3-30B-A3B"
DEEPSEEK: Final = "DeepSeek-V3"

NO_DROPOUT: Final = "--attention-dropout 0 --hidden-dropout 0"
_GROUPS: Final = "--group-query-attention --num-query-groups 8"

MODELS: Final = {
    GPT: "--num-layers 32 --hidden-size 4096 --num-attention-heads 32",
    "8B": f"""--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        {_GROUPS}""",
    "70B": f"""--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
        {_GROUPS}""",
    "405B": f"""--num-layers 128 --hidden-size 16384 --ffn-hidden-size 53248
        --num-attention-heads 128 {_GROUPS}""",
    MIXTRAL: """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --num-experts 8 --moe-router-topk 2""",
    QWEN: """--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
        --kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm
        --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768""",
    DEEPSEEK: """--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
        --num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
        --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
        --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
        --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid
        --moe-layer-freq [0]*3+[1]*58""",
}
"""Sizes of every model. 8B to 405B are Llama 3 (arXiv 2407.21783, table 3), whose largest model has
126 layers, which 16 stages cannot share alike. DeepSeek-V3 is without multi-token prediction."""

UNTIED: Final = "--untie-embeddings-and-output-weights"
LLAMA: Final = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    f"{UNTIED} {NO_DROPOUT}"
)
"""Flags of the layers of every model but the GPT. None of these models is trained with dropout,
which Megatron-LM has unless told otherwise. After a mixture, dropout would also keep its mask, so
that computing the layer again would not end before its last product and exchange."""

SHARDED: Final = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
"""Flags of replicas that share the optimizer (ZeRO-1)."""


class Scenario(NamedTuple):
    """A job: a model on GPUs, in bf16, one sample a microbatch.

    Attributes:
        model: name of its sizes.
        gpu: kind of the GPUs.
        pipeline: pipeline ranks.
        replicas: of the model, which share the optimizer.
        tensor: ranks that share a layer.
        context: ranks that share a sequence.
        expert: ranks over which the experts of a layer are spread.
        expert_tensor: ranks that share an expert.
        schedule: its name, with the chunks of a rank behind a slash.
        treatment: of the vocabulary.
        vocabulary: its entries.
        seq_length: tokens of a sample.
        samples: of an iteration, of all replicas together.
        dispatcher: the way in which tokens travel, if experts are spread.
        more: further flags.
        layers: flags of the layers besides their sizes.
    """

    model: str
    gpu: str = "H100"
    pipeline: int = 1
    replicas: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    schedule: str = "1f1b"
    treatment: str = "vocab-2"
    vocabulary: int = 128_000
    seq_length: int = 4096
    samples: int = 256
    dispatcher: str = "alltoall"
    more: str = ""
    layers: str = LLAMA

    @property
    def flags(self) -> str:
        """The flags of training."""
        name, _, chunks = self.schedule.partition("/")
        has_experts = "--num-experts" in MODELS[self.model]
        if_asked = [
            (chunks, f"--num-virtual-stages-per-pipeline-rank {chunks}"),
            (self.tensor > 1, f"--tensor-model-parallel-size {self.tensor} --sequence-parallel"),
            (self.context > 1, f"--context-parallel-size {self.context} --cp-comm-type a2a"),
            (self.replicas > 1, f"--dry-run-replicas {self.replicas} {SHARDED}"),
            (self.expert > 1, f"--expert-model-parallel-size {self.expert}"),
            (self.expert > 1, f"--moe-token-dispatcher-type {self.dispatcher}"),
            (
                has_experts and self.tensor > 1,
                f"--expert-tensor-parallel-size {self.expert_tensor}",
            ),
        ]
        return f"""--dry-run --dry-run-gpu {self.gpu} --bf16 {MODELS[self.model]} {self.layers}
            --pipeline-model-parallel-size {self.pipeline} --pipeline-schedule {name}
            --vocab-parallel {self.treatment} --vocab-size {self.vocabulary}
            --seq-length {self.seq_length} --micro-batch-size 1 --global-batch-size {self.samples}
            --lr 1e-4 --train-iters 1 {" ".join(own for asked, own in if_asked if asked)}
            {self.more}"""

    @property
    def config(self) -> RunConfig:
        """The run."""
        return parse(self.flags.split(), 1, speak=False)

    @property
    def forecast(self) -> RunForecast:
        """Its dry run."""
        config = self.config
        return forecast_run(config, make_run_plan(config), GPUS[self.gpu])

    @property
    def words(self) -> str:
        """A name for the file of the prediction, of all attributes."""
        return " ".join(str(own) for own in self if own != "")


GPT_ON_8: Final = Scenario(
    GPT, pipeline=8, seq_length=2048, layers=f"{UNTIED} {NO_DROPOUT}", samples=32
)
"""The GPT on 8 pipeline ranks, with learned positions, LayerNorm and GELU."""
