"""The tools of others over a run: lm-evaluation-harness, wandb, mlflow, Jupyter. Each test is skipped where its package is
not installed; nothing here asks the network."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import dreamc

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = ["quick", "brown", "fox", "jumps", "over", "lazy", "dog", "the"]
SPEC = """
model:
  name: mini
  vocab: 256
  hidden: 16
  context: 128
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8}}
    mlp: {mlp: {intermediate: 32}}
  body:
    - repeat: 2
      layers: ["sa > mlp"]
data: {text: book.txt}
train: {steps: 40, batch: 4, sequence: 32, precision: f32, learning_rate: 0.01, evaluate: {every: 20}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    (folder / "mini.yaml").write_text(SPEC)
    (folder / "book.txt").write_text("the quick brown fox jumps over a lazy dog\n" * 60)
    return dreamc.train(folder / "mini.yaml", out=folder / "run")


def tool(*line, cwd=None, **environment):
    """Runs Python, and gives its standard output; a failure shows all of its output."""
    line, environment = [sys.executable, *map(str, line)], {**os.environ, **environment}
    ended = subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_lm_eval_finds_the_accuracy_of_eval(run, tmp_path):
    pytest.importorskip("lm_eval", reason="no lm-evaluation-harness: pip install 'lm_eval[api]'")
    rows = []
    for i in range(40):
        # Every third context ends with a space, which counts as the choice's.
        prompt = f"the {WORDS[i % 8]} brown {WORDS[(3 * i + 1) % 8]}" + " " * (i % 3 == 0)
        choices = [" " * (i % 3 != 0) + WORDS[(i * k + k + i) % 8] for k in (1, 3, 7)]
        rows.append({"prompt": prompt, "choices": choices, "answer": i % 3})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = json.loads(tool("-m", "dreamc", "eval", run.path, "--choices", file, "--json"))
    right = own[0]["choices"]["right"] / len(rows)
    script = ROOT / "tests/clients/lm_eval_client.py"
    said = tool(script, "package", run.path, file, cwd=tmp_path, HF_HOME=str(tmp_path / "hf"))
    found = json.loads(said.splitlines()[-1])
    assert found["accuracy"] == right and 0 < right < 1
    assert found["word_perplexity"] > 1 and 0 <= found["exact"] <= 1
    # The harness's own command, with the tasks that the script left.
    line = ["--model", "dreamc", "--model_args", f"path={run.path}", "--tasks", "ranked", "--include_path", "tasks", "--output_path", "out"]
    quiet = {"HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    tool("-m", "dreamc.lm_eval", *line, cwd=tmp_path, **quiet)
    (report,) = tmp_path.glob("out/**/results_*.json")
    assert json.loads(report.read_text())["results"]["ranked"]["acc,none"] == right


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_missing_is_named(run, tmp_path, name):
    # A finder before all others that has no such package.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {name!r}: raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    line = [sys.executable, "-m", f"dreamc.{name}", str(run.path), "--once"]
    ended = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert f"needs the package {name}: pip install {name}" in ended.stderr


def test_wandb_gets_every_step(run, tmp_path):
    pytest.importorskip("wandb", reason="no wandb: pip install wandb")
    where = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    tool("-m", "dreamc.wandb", run.path, "--project", "tries", **where)
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # Records of the log have names and values as they are.
    assert log.read_bytes().count(b"train/loss") >= 40
    assert log.read_bytes().count(b"validation/") >= 2


def test_mlflow_gets_every_step(run, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="no mlflow: pip install mlflow-skinny")
    store = {"MLFLOW_TRACKING_URI": tmp_path.joinpath("store").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    tool("-m", "dreamc.mlflow", run.path, "--project", "tries", **store)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(store["MLFLOW_TRACKING_URI"])
    (one,) = client.search_runs([client.get_experiment_by_name("tries").experiment_id])
    history = client.get_metric_history(one.info.run_id, "train/loss")
    assert {m.step: m.value for m in history} == {l["step"]: l["loss"] for l in run.lines() if "loss" in l}
    assert one.info.status == "FINISHED" and one.info.run_name == run.path.name


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples/notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook):
    nbformat = pytest.importorskip("nbformat", reason="no notebooks: pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="no notebooks: pip install nbclient ipykernel")
    cells = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(notebook.parent)}}).execute()
    assert all(cell["execution_count"] for cell in cells.cells if cell.cell_type == "code")
    stored = nbformat.read(notebook, as_version=4)
    assert not any(cell.get("outputs") for cell in stored.cells), "outputs are left out of the file"
