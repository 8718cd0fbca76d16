"""Rescale a T5 by powers of two and leave its function as it is.

Residual stream: T5 is pre-norm. Each sublayer reads the stream through an RMS norm, which forgets the stream's scale,
and adds to it by a linear map without bias. So the embeddings and every `o` and `wo` may take one factor, the norms'
eps its square. The tied head reads the same embeddings, which the decoder's final norm undoes.

Inside a sublayer: relu(c x) = c relu(x) for c > 0, and attention is linear in its values. So `wi` and `v` may take a
factor that `wo` and `o` undo.

Powers of two round nothing (short of overflow and subnormals): the fp32 logits are the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

# What the shipped model carries: rescale(model, residual=-8, inner=-6) gives the model as it was trained.
RESIDUAL_EXPONENT = 8
INNER_EXPONENT = 6


def rescale(model: T5ForConditionalGeneration, *, residual: int, inner: int) -> None:
    """Multiply the residual streams by 2**`residual`, what is inside the sublayers by 2**`inner`; in place.

    The negative exponents are the inverse. Encoder and decoder go together, since they share their embeddings.
    Raises ValueError if the feed-forward is not a plain relu one.
    """
    if model.config.feed_forward_proj != "relu":
        raise ValueError(f"cannot rescale a {model.config.feed_forward_proj} feed-forward: use a T5 with relu")
    exponents = {"v": inner, "wi": inner, "o": residual - inner, "wo": residual - inner}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(2.0 ** exponents.get(name.split(".")[-2], 0))
        model.shared.weight.mul_(2.0**residual)
        model.decoder.final_layer_norm.weight.mul_(2.0**-residual)
    for config in (model.config, model.encoder.config, model.decoder.config):
        config.layer_norm_epsilon *= 4.0**residual
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= 4.0**residual
