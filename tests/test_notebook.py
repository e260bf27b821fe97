"""The notebook runs from its first cell to its last: on a tiny model, and, as it is, on the one that it names."""

from pathlib import Path

import nbformat
import pytest
from folders import label_rows, model_folder, needs_smollm2, write_rows
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples/first-run.ipynb"
MODEL = "embedded:smollm2-135m"


def executed(folder: Path, model: str) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in a folder."""
    found = nbformat.read(NOTEBOOK, as_version=4)
    for cell in found.cells:
        cell.source = cell.source.replace(MODEL, model)
    NotebookClient(found, timeout=1400, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return found


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def value(cell: nbformat.NotebookNode) -> str:
    return next(output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result")


def checked(found: nbformat.NotebookNode) -> None:
    """Every cell with code left what its text promises."""
    _, rows, _, training, _, compared, plotted, answers, _, adapter = found.cells
    assert "'label'" in value(rows)
    assert any(word in printed(training) for word in ("Better", "better"))
    assert [line.split()[0] for line in printed(compared).splitlines()] == ["untuned", "bias", "probe", "tuned"]
    assert "image/png" in plotted.outputs[-1].data
    assert value(answers).count("'") == 6
    assert "adapter_model.safetensors" in value(adapter)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_notebook_runs_on_a_tiny_model(tmp_path):
    (tmp_path / "issues").mkdir()
    for part, count in (("train", 60), ("dev", 20), ("test", 20)):
        write_rows(tmp_path / f"issues/{part}.jsonl", label_rows(count, seed=count))
    checked(executed(tmp_path, str(model_folder(tmp_path, "llama"))))


@needs_smollm2
@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1500)
def test_the_notebook_runs_as_it_is(tmp_path):
    (tmp_path / "issues").symlink_to(NOTEBOOK.parent / "issues")
    checked(executed(tmp_path, MODEL))
