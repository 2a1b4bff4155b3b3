"""Numbers that show whether the experts of a model share the work."""

from torch import Tensor


def load_metrics(load: Tensor) -> dict[str, float]:
    """Balance of `load`, tokens per expert [E] or per layer and expert [L, E]; empty where nothing was counted.

    load_cv: coefficient of variation (standard deviation / mean over the experts), mean over layers; 0 is even.
    load_max_over_mean: busiest expert / mean, of the worst layer; 1 is even, E / K the worst possible.
    dead_experts: experts without a token, over all layers; dead_share: the same as a share of all experts.
    """
    load_LE = load.reshape(-1, load.shape[-1]) if load.numel() else load.reshape(0, 1)
    load_LE = load_LE[load_LE.sum(-1) > 0].double()
    if not load_LE.numel():
        return {}
    mean_L = load_LE.mean(-1)
    dead = int((load_LE == 0).sum())
    return {
        "load_cv": float((load_LE.std(-1, correction=0) / mean_L).mean()),
        "load_max_over_mean": float((load_LE.amax(-1) / mean_L).max()),
        "dead_experts": float(dead),
        "dead_share": dead / load_LE.numel(),
    }
