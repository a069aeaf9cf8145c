"""What adapters compute: the product s B A of each layer, and its best approximations."""

import torch


def updates(slots, name):
    """The product s B A of each layer, in float64."""
    state, found = slots.state(name), {}
    for key, layer in slots.layers.items():
        if name not in layer.scaling:
            continue
        a, b = (state[f"{key}.lora_{part}.weight"].double() for part in "AB")
        found[key] = layer.scaling[name] * (b @ a)
    return found


def nearest(product, rank):
    """The nearest matrix of a rank."""
    u, s, vh = torch.linalg.svd(product)
    return u[:, :rank] * s[:rank] @ vh[:rank]
