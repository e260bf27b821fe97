"""The plan of a run: shape, rank and update of every parameter of the model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tezo.optim.methods import Tuner


def plan(model: Any, optimizer: Tuner) -> list[dict[str, Any]]:
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
            rank, application = optimizer.application(name)
            row |= {"kind": targets[name].kind, "rank": rank, "moved": application}
            row["also"] = [site.name for site in targets[name].sites[1:]]
        rows.append(row)
    return rows


def parameter_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The number of parameter entries of a `plan`: {"total": all, "trained": those that are trained}."""
    sizes = [(math.prod(row["shape"]), row["trained"]) for row in rows]
    return {"total": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}
