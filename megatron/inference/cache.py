"""Attention that keeps the keys and values of earlier positions.

All rows of a batch end at the same slot: padding stands before a shorter prompt, and no token sees
it. So a new token has the same slot in every row, and two tokens of a row are as far apart in slots
as in positions.

Shapes: b rows of a batch, s new tokens, t filled slots with the new tokens, h hidden size, g
key/value heads, r query heads per key/value head, a = g r query heads, d channels of a head, c = r
+ 2 heads of a group (queries, key and value).
"""

import math

import torch
from torch import Tensor, nn

from megatron.kernels.heads import split_heads
from megatron.layers.attention import SelfAttention
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.latent_attention import LatentAttention


class Slots:
    """Which slots of a batch hold tokens. All layers of a rank share this object.

    Every row has ``capacity`` slots, and its first ``padding_b`` (int64) slots hold no token.

    Attributes:
        filled: number of slots that have been filled.
    """

    def __init__(self, padding_b: Tensor, capacity: int) -> None:
        self._padding_b = padding_b
        self.capacity = capacity
        self.filled = 0

    @property
    def rows(self) -> int:
        """Rows b of the batch."""
        return len(self._padding_b)

    def positions(self, count: int) -> Tensor:
        """Return the positions of the next ``count`` tokens of every row [b, s]; padding has 0."""
        slot_s = torch.arange(self.filled, self.filled + count, device=self._padding_b.device)
        return (slot_s - self._padding_b[:, None]).clamp_min(0)

    def distances(self, count: int) -> Tensor:
        """Return the distance in slots from each key to each of the next queries [s, t]."""
        slot_t = torch.arange(self.filled + count, device=self._padding_b.device)
        return slot_t[self.filled :, None] - slot_t

    def hidden(self, count: int, window: int | None) -> Tensor:
        """Return the keys that the next ``count`` queries do not see, a mask [b, s, t].

        A query at a slot of padding sees itself, so that its softmax has one score.

        Args:
            count: number of queries s.
            window: number of slots before its own that a query sees; ``None``: all of them.
        """
        behind_st = self.distances(count)
        hidden_st = behind_st < 0
        if window is not None:
            hidden_st |= behind_st > window
        slot_t = torch.arange(self.filled + count, device=self._padding_b.device)
        padding_b1t = (slot_t < self._padding_b[:, None])[:, None]
        return hidden_st | (padding_b1t & (behind_st != 0))


class CachedAttention(nn.Module):
    """A layer's attention with its parameters, for the forward alone."""

    def __init__(self, attention: SelfAttention | LatentAttention, slots: Slots) -> None:
        super().__init__()
        self._attention = attention
        self._slots = slots
        self._kept: list[Tensor] = []

    def forward(self, x_bsh: Tensor, forward_pass: ForwardPass) -> Tensor:
        """Return the attention's output for the next tokens.

        ``forward_pass`` has the layer's rotary embedding for their positions, or ``None``.
        """
        q_bsad, *new = self._heads(x_bsh, forward_pass)
        if not self._kept:
            self._kept = [self._empty(each_bsgd) for each_bsgd in new]
        begin, end = self._slots.filled, self._slots.filled + x_bsh.shape[1]
        for kept_bgtd, new_bsgd in zip(self._kept, new, strict=True):
            kept_bgtd[:, :, begin:end] = new_bsgd.transpose(1, 2)
        context_bsad = self._attend(q_bsad, *(kept_bgtd[:, :, :end] for kept_bgtd in self._kept))
        if isinstance(self._attention, LatentAttention):
            context_bsad = context_bsad[..., : self._attention.settings.v_head_dim]
        return self._attention.linear_proj(context_bsad.flatten(2))

    def _empty(self, new_bsgd: Tensor) -> Tensor:
        """Return memory for the keys or values of all slots, [b, g, t, d]."""
        groups, channels = new_bsgd.shape[2:]
        return new_bsgd.new_empty((self._slots.rows, groups, self._slots.capacity, channels))

    def _heads(self, x_bsh: Tensor, forward_pass: ForwardPass) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [b, s, a, d], keys and values [b, s, g, d] of the next tokens."""
        own, rope = self._attention, forward_pass.rope
        if isinstance(own, LatentAttention):
            return own.heads(*own.latents(x_bsh), forward_pass)
        shape = own.shape
        qkv_bsgcd = own.linear_qkv(x_bsh).unflatten(
            2, (shape.num_groups, shape.heads_per_group + 2, shape.head_size)
        )
        q_bsad, k_bsgd, v_bsgd = split_heads(qkv_bsgcd)
        return *own.turned(q_bsad, k_bsgd, rope), v_bsgd

    def _attend(self, q_bsad: Tensor, k_bgtd: Tensor, v_bgtd: Tensor) -> Tensor:
        """Return every query's mean of the values it sees [b, s, a, d]; scores in fp32 or wider."""
        scores, groups, count = self._attention.scores, k_bgtd.shape[1], q_bsad.shape[1]
        q_bgrsd = q_bsad.transpose(1, 2).unflatten(1, (groups, -1))
        wide = torch.promote_types(q_bsad.dtype, torch.float32)
        score_bgrst = (q_bgrsd @ k_bgtd[:, :, None].mT).to(wide)
        score_bgrst *= scores.scale_of(q_bsad.shape[-1])
        if scores.softcap:
            score_bgrst = scores.softcap * torch.tanh(score_bgrst / scores.softcap)
        if scores.slopes_a:
            slope_gr11 = score_bgrst.new_tensor(scores.slopes_a).view(groups, -1, 1, 1)
            score_bgrst -= slope_gr11 * self._slots.distances(count)
        hidden_b11st = self._slots.hidden(count, scores.window)[:, None, None]
        score_bgrst.masked_fill_(hidden_b11st, -math.inf)
        own = self._attention
        sinks_a = own.sinks() if isinstance(own, SelfAttention) else None
        if sinks_a is not None:
            sink_bgrs1 = sinks_a.to(wide).view(groups, -1, 1, 1).expand(*score_bgrst.shape[:-1], 1)
            score_bgrst = torch.cat((score_bgrst, sink_bgrs1), -1)
        seen_bgrst = score_bgrst.softmax(-1)[..., : k_bgtd.shape[2]]
        context_bgrsd: Tensor = seen_bgrst.to(v_bgtd.dtype) @ v_bgtd[:, :, None]
        return context_bgrsd.flatten(1, 2).transpose(1, 2)
