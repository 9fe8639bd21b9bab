"""The microbatch that is counted."""

import torch
from torch import Tensor

from megatron.kernels.documents import Documents
from megatron.runtime.batch import DeviceMicrobatch
from megatron.training.planning.count.recorder import META
from megatron.training.planning.count.subject import Subject


def document_starts(subject: Subject) -> Tensor:
    """Return the starts of documents, [b, s] on the host: every sample is one document.

    The tensor is a single number in memory, so a mistyped size is no harm.
    """
    return torch.zeros((), dtype=torch.int64).expand(subject.samples, subject.model.seq_length)


def counted_microbatch(subject: Subject, starts_bs: Tensor) -> DeviceMicrobatch:
    """Return a microbatch of one rank, without values.

    Args:
        subject: the model, the size of a microbatch and the layout.
        starts_bs: as ``document_starts`` returns.
    """
    samples, asked = subject.samples, subject.documents
    tokens = samples * subject.model.seq_length // subject.context_size
    has_mask = asked is not None and asked.reset_attention_mask
    has_positions = asked is not None and asked.reset_position_ids
    return DeviceMicrobatch(
        tokens_n=_integers(tokens),
        targets_n=_integers(tokens),
        weight_n=torch.empty(tokens, device=META),
        samples=samples,
        valid_tokens=float(tokens),
        documents=_documents(starts_bs) if has_mask else None,
        positions_bs=_integers(samples, tokens // samples) if has_positions else None,
    )


def _documents(starts_bs: Tensor) -> Documents:
    samples, length = starts_bs.shape
    bounds_k = torch.empty(samples + 1, dtype=torch.int32, device=META)
    return Documents(_integers(samples, length), starts_bs, bounds_k, length)


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)
