"""The package as a person uses it: a model trained here, looked at, and continued."""

import json
import subprocess
import sys

import numpy as np
import pytest

import dreamc

SPEC = """
model:
  name: mini
  vocab: 256
  hidden: 8
  context: 32
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4}}
    mlp: {mlp: {intermediate: 16}}
  body:
    - repeat: 2
      layers: ["sa > mlp"]
data: {text: book.txt}
train: {steps: 4, batch: 2, sequence: 16, precision: f32, evaluate: {every: 2}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dreamc")
    (folder / "mini.yaml").write_text(SPEC)
    (folder / "book.txt").write_text("the quick brown fox jumps over a lazy dog\n" * 60)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    heard = []
    run = dreamc.train(folder / "mini.yaml", out=folder / "run", on_step=heard.append)
    assert [line["step"] for line in heard if "loss" in line] == [1, 2, 3, 4]
    return run


def test_check_gives_every_default_and_refuses_at_the_token(folder):
    checked = dreamc.check(folder / "mini.yaml")
    assert "head_size: 4" in checked.text and isinstance(checked.warnings, list)
    wrong = folder / "wrong.yaml"
    wrong.write_text(SPEC.replace("hidden: 8", "hiden: 8"))
    with pytest.raises(dreamc.SpecError) as error:
        dreamc.check(wrong)
    assert (error.value.line, error.value.column) == (5, 3)
    assert error.value.file.endswith("wrong.yaml")
    assert error.value.diagnostics and isinstance(error.value, dreamc.DreamcError)


def test_count_is_the_commands(folder):
    counted = dreamc.count(folder / "mini.yaml", {"model.hidden": 16})
    command = [sys.executable, "-m", "dreamc", "count", str(folder / "mini.yaml"), "--set", "model.hidden=16", "--json"]
    assert counted == json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_arrays_of_a_run(run):
    model = run.load(threads=1)
    ids = np.arange(18).reshape(2, 9)
    logits = model.logits(ids)
    assert logits.shape == (2, 9, 256) and logits.dtype == np.float32
    scores = logits[:, :-1].astype(np.float64)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(scores, ids[:, 1:, None], axis=-1).mean()
    assert model.loss(ids) == pytest.approx(expected, rel=1e-5)
    weights, gradients = model.weights(), model.gradients(ids)
    assert weights["embed.weight"].shape == gradients["embed.weight"].shape == (256, 8)
    hidden = model.hidden(ids[:, :8])
    assert hidden.shape == (3, 2, 8, 8)
    np.testing.assert_allclose(hidden[0], weights["embed.weight"][ids[:, :8]], rtol=1e-6)
    assert model.detokenize(model.tokenize("a fox", begin=False)) == "a fox"


def test_values_inside_are_captured_and_patched(run):
    model = run.load(threads=1)
    a, b = np.arange(16).reshape(2, 8), np.arange(30, 46).reshape(2, 8)
    assert model.points(2, 8)["layers.1.sa.scores"] == (("batch", "seq", "heads", "keys"), (2, 8, 2, 8))
    found = model.run(a, capture=["layers.*.out", "layers.1.sa.scores"])
    np.testing.assert_allclose(found["logits"], model.logits(a), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["layers.0.out"], model.hidden(a)[1], rtol=1e-5, atol=1e-6)
    scores = found["layers.1.sa.scores"]
    assert scores.shape == (2, 8, 2, 8) and scores.dtype == np.float32
    np.testing.assert_allclose(scores.sum(-1), 1, rtol=1e-5)
    assert (np.triu(np.moveaxis(scores, 2, 1), 1) == 0).all()

    stream = found["layers.1.out"]
    patched = model.run(b, patch={"layers.1.out": stream}, tokens=[5])["logits"]
    plain = model.logits(b)
    np.testing.assert_allclose(patched[:, 5], found["logits"][:, 5], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.delete(patched, 5, 1), np.delete(plain, 5, 1), rtol=1e-5, atol=1e-6)
    # Any order of memory, any type of numbers.
    turned = np.asfortranarray(stream.astype(np.float64))
    np.testing.assert_array_equal(model.run(b, patch={"layers.1.out": turned}, tokens=[5])["logits"], patched)
    np.testing.assert_allclose(model.run(b)["logits"], plain, rtol=1e-5, atol=1e-6)

    with pytest.raises(dreamc.DreamcError, match="nearest are `layers.1.out`"):
        model.run(a, capture="layers.1.ou")
    with pytest.raises(dreamc.DreamcError, match="is .2, 8, 8. here, and .2, 7, 8. was given"):
        model.run(b, patch={"layers.1.out": stream[:, :7]})
    with pytest.raises(dreamc.DreamcError, match="there is no token 8"):
        model.run(b, patch={"layers.1.out": stream}, tokens=[8])


def test_gradients_are_slopes(run):
    model = run.load(threads=1)
    ids = [[5, 6, 7, 8, 9, 10]]
    gradient = model.gradients(ids)["embed.weight"]
    assert np.count_nonzero(np.abs(gradient[[5, 6, 7, 8, 9]]).sum(axis=1)) == 5


def test_generation_is_the_same_with_and_without_a_cache(run):
    model = run.load()
    # Without a cache a text has as many tokens as a row of training.
    one = model.generate("the quick", max_tokens=6)
    assert one == model.generate("the quick", max_tokens=6, cache=False)
    assert model.generate(["the quick", "a lazy"], max_tokens=6)[0] == one


def test_metrics_of_runs(run, folder):
    steps = dreamc.runs(folder).metrics()
    column = steps["step"].tolist() if hasattr(steps, "columns") else [line["step"] for line in steps]
    assert column == [1, 2, 3, 4]
    assert run.ledger["steps"] == 4


def test_an_exception_stops_the_run(folder):
    class Enough(Exception):
        pass

    def stop(line):
        if line["step"] == 2:
            raise Enough

    with pytest.raises(Enough):
        dreamc.train(folder / "mini.yaml", out=folder / "stopped", on_step=stop)
    assert len(list(dreamc.Run(folder / "stopped").lines())) < 8
    # The wish to stop is over: another run trains to its end.
    assert dreamc.train(folder / "mini.yaml", out=folder / "again").ledger["steps"] == 4


def test_errors_are_exceptions(run, folder):
    with pytest.raises(dreamc.DreamcError, match="not below the vocabulary"):
        run.load().logits([[300]])
    with pytest.raises(dreamc.DreamcError, match="no device"):
        dreamc.load(run.path, device="abacus")
    with pytest.raises(FileNotFoundError):
        dreamc.Run(folder)
    # Nothing is overwritten.
    with pytest.raises(dreamc.DreamcError):
        dreamc.train(folder / "mini.yaml", out=run.path)


def test_a_model_begins_from_a_donor_and_is_taught_by_it(run, folder):
    experts = SPEC.replace("mlp: {mlp: {intermediate: 16}}", "ea: {experts: {count: 3, active: 2, intermediate: 16, query: 4}}")
    experts = experts.replace("sa > mlp", "sa > ea").replace("name: mini", "name: upcycled")
    stages = "heal: {stages: [{match: layers, steps: 2}, {match: logits, temperature: 2, loss: 0.5}]}"
    taught = folder / "taught.yaml"
    taught.write_text(f"transplant: {{from: run}}\n{stages}\n{experts}")
    # The plan of a model whose gates sum to one: it begins as its donor, which is its teacher too.
    heard = []
    upcycled = dreamc.train(taught, out=folder / "upcycled", on_step=heard.append)
    losses = [line["taught"] for line in heard if "taught" in line]
    assert len(losses) == 4 and losses[0] == pytest.approx(0, abs=1e-6) and all(np.isfinite(losses))
    assert upcycled.ledger["donor_flops"] == run.ledger["executed_flops"]
    assert upcycled.ledger["teacher_flops"] > 0 and upcycled.ledger["teacher_flops_per_token"] > 0
    ids = np.arange(18).reshape(2, 9)
    donor = run.load(threads=1)
    begun = dreamc.load(folder / "upcycled" / "begin", threads=1)
    np.testing.assert_allclose(begun.logits(ids), donor.logits(ids), rtol=1e-4, atol=1e-5)
    weights = begun.weights()
    np.testing.assert_array_equal(weights["layers.1.ea.up.weight"][2], donor.weights()["layers.1.mlp.up.weight"])
    # Another vocabulary, a context that is too short, a donor that is not there: nothing is written.
    for text, message in [
        (taught.read_text().replace("vocab: 256", "vocab: 300"), "the teacher's vocabulary has 256 tokens"),
        (
            taught.read_text().replace("context: 32", "context: 64").replace("sequence: 16", "sequence: 64"),
            "the teacher's context is 32",
        ),
        (taught.read_text().replace("from: run", "from: nowhere"), "the donor cannot be opened"),
        (taught.read_text().replace("match: layers,", "match: layers.7.out,"), "names no value of the model"),
    ]:
        (folder / "bad.yaml").write_text(text)
        with pytest.raises(dreamc.DreamcError, match=message):
            dreamc.train(folder / "bad.yaml", out=folder / "bad")
        assert not (folder / "bad").exists()


def test_an_exam_is_sat_and_read(folder):
    for name, layers in [("short", 1), ("long", 2)]:
        text = SPEC.replace("name: mini", f"name: {name}").replace("context: 32", "context: 128")
        (folder / f"{name}.yaml").write_text(text.replace("repeat: 2", f"repeat: {layers}"))
    specs = [folder / "short.yaml", folder / "long.yaml"]
    exam = dreamc.exam(*specs, steps=20, seeds=1, tasks=["modular_sum"], out=folder / "exam", allow_unequal=True, threads=1)
    assert (exam.tasks, exam.arms) == (["modular_sum"], ["short", "long"])
    lines = exam.lines()
    assert {line["arm"] for line in lines} == {"short", "long"} and any(line["beyond"] for line in lines)
    scores = exam.overall()
    of = [line["exact"] for line in lines if line["arm"] == "long" and not line["beyond"]]
    assert scores["long"] == pytest.approx(sum(of) / len(of))
    inside = exam.inside("modular_sum")
    assert inside[1]["arm"] == "long" and len(inside[1]["heads"]) == inside[1]["all_heads"] == 4
    assert inside[1]["exact"] == pytest.approx(scores["long"], abs=0.2)
    assert exam.run("modular_sum", "long").ledger["steps"] == 20
    assert dreamc.exam(folder / "exam", threads=1).lines() == lines
    with pytest.raises(dreamc.DreamcError, match="exit code 2"):
        dreamc.exam(*specs, steps=20, tasks=["sorting"], out=folder / "exam", allow_unequal=True)


def test_rank_correlations_have_the_values_of_the_formula():
    found = dreamc.rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5])
    assert found["correlation"] == pytest.approx(0.8) and found["n"] == 5
    assert -1 <= found["low"] <= found["correlation"] <= found["high"] <= 1
    assert dreamc.rank_correlation([1, 1, 2, 3], [5, 5, 6, 9])["correlation"] == pytest.approx(1.0)
    assert dreamc.rank_correlation(range(6), [-x for x in range(6)])["high"] == pytest.approx(-1.0)
    with pytest.raises(ValueError, match="at least four"):
        dreamc.rank_correlation([1, 2, 3], [1, 2, 3])
