"""The maximal update parametrisation beside the shape of the model and the optimizer."""

import math
from collections.abc import Iterator

from megatron.flags.groups import Flags
from megatron.flags.rules import notes, refuses
from megatron.layers.settings import LatentAttentionSettings, PositionSettings
from megatron.model.settings import ShapeSettings
from megatron.model.width_settings import WidthSettings
from megatron.optimizer.settings import MuonSettings, OptimizerSettings


@refuses
def _other_quotient(flags: Flags) -> Iterator[str]:
    own, hidden = flags[WidthSettings], flags[ShapeSettings].hidden_size
    given, width = own.mup_width_mult, own.width(hidden)
    if own.use_mup and given is not None and not math.isclose(given, width, rel_tol=1e-6):
        base = own.mup_base_hidden_size or hidden
        yield (
            f"--mup-width-mult {given:g} is not --hidden-size {hidden} / --mup-base-hidden-size "
            f"{base} = {width:g}: leave it out, and give --mup-base-hidden-size"
        )


@refuses
def _latent_scores(flags: Flags) -> Iterator[str]:
    if flags[WidthSettings].use_mup and flags[LatentAttentionSettings].multi_latent_attention:
        yield (
            "--use-mup does not go with --multi-latent-attention, whose scores Megatron-LM's muP "
            "leaves alone: leave one of them out"
        )


@refuses
def _learned_positions(flags: Flags) -> Iterator[str]:
    factor, kind = flags[WidthSettings].mup_embedding_mult, flags[PositionSettings]
    learned = kind.position_embedding_type == "learned_absolute"
    if flags[WidthSettings].use_mup and factor != 1 and learned:
        yield (
            f"--mup-embedding-mult {factor:g} with learned positions, which Megatron-LM multiplies "
            "too: leave it out, or take --position-embedding-type rope"
        )


@notes
def _given_anyway(flags: Flags) -> Iterator[str]:
    own = flags[WidthSettings]
    if own.use_mup and own.mup_width_mult is not None:
        yield (
            f"--mup-width-mult {own.mup_width_mult:g} changes nothing: it follows from "
            "--hidden-size and --mup-base-hidden-size"
        )


@notes
def _at_the_base(flags: Flags) -> Iterator[str]:
    own, hidden = flags[WidthSettings], flags[ShapeSettings].hidden_size
    changes_more = own.mup_embedding_mult != 1 or own.mup_output_mult != 1
    if own.use_mup and own.width(hidden) == 1 and not changes_more:
        yield (
            f"--use-mup changes the scale of attention's scores alone at the base width: "
            f"--mup-base-hidden-size is {hidden}, as --hidden-size"
        )


@notes
def _muon_scales_itself(flags: Flags) -> Iterator[str]:
    is_muon = flags[OptimizerSettings].optimizer == "muon"
    mode = flags[MuonSettings].muon_scale_mode
    if flags[WidthSettings].use_mup and is_muon and mode == "spectral":
        yield (
            "--use-mup changes no learning rate of --optimizer muon, whose updates have a length "
            "of their own: --muon-scale-mode unit_rms_norm is the one that keeps their size at "
            "every width"
        )
