"""The norms of a model, as data that builds them."""

from dataclasses import dataclass

from torch import nn

from megatron.layers.heads_norm import HeadsNorm
from megatron.layers.norm import NormKind, build_norm
from megatron.layers.site import Site
from megatron.model.settings import ModelSettings


@dataclass(frozen=True)
class NormSpec:
    """A norm; see ``build_norm``."""

    kind: NormKind
    epsilon: float
    zero_centred: bool = False

    def build(self, size: int, site: Site, *, of_stream: bool = False) -> nn.Module:
        """Return a norm over ``size`` channels.

        Args:
            size: number of channels.
            site: device, dtype, ranks and kernels of the norm.
            of_stream: the norm reads the residual stream, which may be fp32.
        """
        kernels = site.stream_kernels if of_stream else site.kernels
        return build_norm(
            self.kind,
            size,
            self.epsilon,
            site.dtype,
            site.device,
            kernels,
            zero_centred=self.zero_centred,
        )

    def across(self, channels: int, site: Site) -> nn.Module:
        """Return a norm over the channels of all heads, which tensor-parallel ranks share."""
        assert self.kind == "RMSNorm", f"no {self.kind} over all heads"
        return HeadsNorm(channels, self.epsilon, site, zero_centred=self.zero_centred)


def norm_spec(config: ModelSettings) -> NormSpec:
    """Return the spec that all norms of a model share."""
    return NormSpec(
        config.norm.normalization, config.norm.norm_epsilon, config.norm.apply_layernorm_1p
    )
