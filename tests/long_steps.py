"""Runs of a few long steps, by every method."""

from pathlib import Path
from typing import Any

from tezo.training.settings import Config, parse_config

DENSE = ("mezo", "mezo-adam", "lozo", "subzo", "zo-adamu", "tezo-adam")
FACTORED = ("tezo", "tezo-m", "tezo-cadam")
RANKED = {name: {"rank": 4} for name in ("lozo", "subzo", "tezo-adam", *FACTORED)}
# Steps so long that the dev loss rises and falls.
WILD = {
    "mezo": 3e-3, "mezo-adam": 3e-2, "lozo": 1e-2, "subzo": 1e-2, "zo-adamu": 1e-2, "tezo-adam": 3e-2,
    "tezo": 1e-2, "tezo-m": 5e-2, "tezo-cadam": 5e-2,
}  # fmt: skip


def config(home: Path, method: str = "tezo-cadam", *, data: Any = ("train", "dev", "test"), **settings: Any) -> Config:
    options = RANKED.get(method, {}) | ({"lazy_update_interval": 3} if method in ("lozo", "subzo") else {})
    options |= {key: settings.pop(key) for key in ("lr", "targets") if key in settings}
    return parse_config(
        {
            "model": str(home / "opt"),
            "data": {name: str(home / f"{name}.jsonl") for name in data},
            "method": {"name": method, "lr": WILD[method], **options},
            "train": {"steps": 8, "batch_size": 4, "eval_every": 1, "log_every": 3} | settings,
        }
    )
