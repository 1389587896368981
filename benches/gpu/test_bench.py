"""What of the script needs no GPU: `python benches/gpu/test_bench.py`."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest

import bench


class Bench(unittest.TestCase):
    def test_the_plan_names_every_part(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(bench.main(["--plan"]), 0)
        for name in ("calibration", "losses_ptx", "dreamc_la-16", "torch_dr-da-16", "count_la-16"):
            self.assertIn(name + ":", out.getvalue())

    def test_utilisation(self):
        self.assertAlmostEqual(bench.utilisation(1e5, 3e9, 1e15), 0.3)
        self.assertEqual(bench.peak("NVIDIA H200"), 989.4e12)
        self.assertIsNone(bench.peak("something else"))

    def test_json_at_the_end_of_other_words(self):
        self.assertEqual(bench.last_json('compiling\n{"a": {"b": 1}}\n'), {"a": {"b": 1}})
        self.assertEqual(bench.last_json('{\n "a": 1\n}'), {"a": 1})
        with self.assertRaises(ValueError):
            bench.last_json("nothing")

    def test_a_part_that_fails_is_reported_and_one_without_means_is_skipped(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            with contextlib.redirect_stdout(io.StringIO()):
                bench.run("bad", ["python3", "-c", "raise SystemExit(3)"], [], out)
                bench.run("good", ["python3", "-c", "print('{\"tokens\": 10}')"], [], out)
                if not bench.gpu():
                    bench.run("far", ["python3"], ["gpu"], out)
            text = bench.report(out, "")
            self.assertIn("| bad | failed (3) |", text)
            self.assertIn("| good | ok |", text)
            if not bench.gpu():
                self.assertIn("| far | skipped: no GPU", text)

    def test_the_table(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            ledger = {"tokens": 1000, "train_seconds": 0.01, "peak_memory": 2e9}
            for name, value in (("dreamc_la-16", ledger), ("count_la-16", {"flops_per_token": {"training": 3e9}})):
                entry = {"name": name, "skipped": None, "code": 0, "json": value}
                (out / f"{name}.json").write_text(json.dumps(entry))
            for device, loss in (("cpu", 2.0), ("ptx", 2.002)):
                (out / f"run-{device}").mkdir()
                (out / f"run-{device}" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
            text = bench.report(out, "NVIDIA H100 80GB")
            self.assertIn("| la-16 | dreamc | 100,000 | 30.3 % | 2.0 |", text)
            self.assertIn("ptx against cpu: 1.0e-03", text)

    def test_the_text_repeats(self):
        with tempfile.TemporaryDirectory() as folder:
            a, b = pathlib.Path(folder) / "a", pathlib.Path(folder) / "b"
            bench.text(a, 1000)
            bench.text(b, 1000)
            self.assertEqual(a.read_text(), b.read_text())
            self.assertGreater(len(a.read_text()), 900)


if __name__ == "__main__":
    unittest.main()
