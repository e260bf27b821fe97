"""What a run does to each parameter of its model, as entries and as sentences."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tezo.directions.ranks import is_zero
from tezo.directions.targets import ALL_LINEAR, find_targets
from tezo.forward.engine import Engine
from tezo.methods import method
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.training.recipe import Config


def plan(model: Any, optimizer: BaseOptimizer) -> list[dict[str, Any]]:
    """One entry per parameter of the model.

    Each has "name", "shape" and "trained". A trained parameter also has "kind", "rank", "moved" (how it is perturbed
    and updated) and "also" (other modules that share it).
    """
    targets = {target.name: target for target in optimizer.targets}
    rows: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        shape = targets[name].shape if name in targets else parameter.shape
        row: dict[str, Any] = {"name": name, "shape": list(shape), "trained": name in targets}
        if name in targets:
            rank, way = optimizer.rank_and_way(name)
            row |= {"kind": targets[name].kind, "rank": rank, "moved": way}
            row["also"] = [site.name for site in targets[name].sites[1:]]
        rows.append(row)
    return rows


def parameter_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The number of parameter entries of a `plan`: {"total": all, "trained": those that are trained}."""
    sizes = [(math.prod(row["shape"]), row["trained"]) for row in rows]
    return {"total": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}


def untrained_notice(names: Sequence[str], engine: Engine | None) -> list[str]:
    """On parameters that no step can reach."""
    why = "the loss does not depend on them, or reads them past their modules"
    why = why if engine is None else f"{engine.name} changes linear layers inside the model alone"
    return [f"left untrained, since {why}: {_some(names)}."] if names else []


def left_out_notice(config: Config, optimizer: BaseOptimizer, untrained: Collection[str]) -> list[str]:
    """On matrices that the loss depends on and that all-linear leaves out, such as the experts of a mixture."""
    if ALL_LINEAR not in config.method.options.get("targets", method(config.method.name).defaults()["targets"]):
        return []
    tuned = {*(target.name for target in optimizer.targets), *untrained}
    out = [t for t in find_targets(optimizer.model) if t.kind == "other" and t.name not in tuned]
    if not out:
        return []
    share = sum(t.parameter.numel() for t in out) / sum(p.numel() for p in optimizer.model.parameters())
    return [f"not trained, since they are no linear layers' weights: {_some([t.name for t in out])} "
            f"({share:.0%} of the model); method.targets=all, or their names, trains them too."]  # fmt: skip


def rank_notice(config: Config, optimizer: BaseOptimizer) -> list[str]:
    """On ranks that were chosen, or are lower than what was asked for."""
    defaults = method(config.method.name).defaults()
    wanted = config.method.options.get("rank", defaults.get("rank"))
    if "rank_rule" in defaults and wanted is None:
        return _chosen_ranks_notice(config.method.options.get("rank_rule", defaults["rank_rule"]), optimizer)
    names = [target.name for target in optimizer.targets]
    lower = [name for name in names if wanted and (optimizer.rank_and_way(name)[0] or wanted) < wanted]
    return [f"method.rank is {wanted}, lowered to the smaller side of: {_some(lower)}."] if lower else []


def _chosen_ranks_notice(rule: str, optimizer: BaseOptimizer) -> list[str]:
    """On the ranks that Eq. 7 chose, before the first step."""
    matrices = [target for target in optimizer.targets if target.is_matrix]
    ranks = sorted({optimizer.rank_and_way(target.name)[0] or 0 for target in matrices})
    if not ranks:
        return []
    zero = [target.name for target in matrices if is_zero(target)]
    of = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    without = f", without {_some(zero)}, which are zero" if zero else ""
    return [f"method.rank: {of} in {len(matrices)} matrices, by method.rank_rule={rule}{without}."]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
