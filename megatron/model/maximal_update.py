"""The maximal update parametrisation: hyperparameters that fit models of every width.

Tuned on a model of a small width, learning rate and spread of the initial weights are right for a
wider one too (arXiv 2203.03466) if they follow from the *width multiplier* w, hidden size / base
hidden size. Names and formulas are those of Megatron-LM after Core 0.16 (its pull request 3058).
Matrices inside the model are drawn with a deviation of 1 / √w; vocabulary layers and positions are
not scaled. Logits are multiplied by 1 / w, and products of queries and keys by 1 / d, not 1 / √d.
What becomes of the learning rates stands in ``megatron.optimizer.lr_schedule``.

All of this can be said by other settings of a model, so no layer knows of muP.
"""

import math

from megatron.model.settings import ModelSettings


def in_usual_terms(model: ModelSettings) -> ModelSettings:
    """Return an equal model that says by other settings what muP makes of it.

    Args:
        model: with values that are final. Without muP it is returned as it is.
    """
    own = model.widths
    if not own.use_mup:
        return model
    width, std = own.width(model.hidden_size), model.init_method_std
    scale, vocabulary = model.attention.softmax_scale, model.vocabulary
    if scale is None:
        channels = model.attention.kv_channels
        assert channels is not None, "a completed model has this width"
        scale = math.sqrt(own.mup_base_head_dim or 1.0) / channels**own.mup_attn_scale_power
    output = 1.0 / width if own.mup_output_mult == 1 else own.mup_output_mult
    embedding_std = model.embedding_init_method_std
    embedding_std = std if embedding_std is None else embedding_std
    output_std = model.output_layer_init_method_std
    return model.replaced(
        init_method_std=std / math.sqrt(width),
        embedding_init_method_std=embedding_std,
        output_layer_init_method_std=embedding_std if output_std is None else output_std,
        softmax_scale=scale,
        logit_multiplier=vocabulary.logit_multiplier * output,
        embedding_multiplier=vocabulary.embedding_multiplier * own.mup_embedding_mult,
        use_mup=False,
    )
