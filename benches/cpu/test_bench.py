"""What of the script needs neither PyTorch nor a built dreamc: `python benches/cpu/test_bench.py`."""

import contextlib
import io
import unittest

import bench


class Bench(unittest.TestCase):
    def test_every_variant_is_planned_and_every_spec_exists(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(bench.main(["--plan"]), 0)
            self.assertEqual(bench.main(["--plan", "--scaling"]), 0)
        for name in ("a: dreamc bf16:", "d: torch f32 compiled:", "c: torch bf16 compiled grouped:", "dreamc depth 16"):
            self.assertIn(name, out.getvalue())
        for model in bench.MODELS:
            self.assertTrue((bench.HERE / f"{model}.yaml").is_file())

    def test_the_best_of_pytorch_counts(self):
        def run(rate, **more):
            return {"training": {"tokens_per_second": rate, "flops_per_second": 5e10}, **more}

        rounds = {
            "dreamc f32": [run(300, ceiling={"f32": 1e11}, peak_resident=5e7), run(100), run(200)],
            "torch f32 eager": [run(50), run(70), run(60)],
            "torch bf16 compiled": [run(100), run(90), {}],
            "torch bf16 eager": [{}, {}, {}],
        }
        self.assertEqual(bench.best(rounds, "torch")[0], "torch bf16 compiled")
        text = bench.report({"a": rounds})
        self.assertIn("| a | dreamc f32 | 200 | 2.11 × | 50 |  | 50 % |", text)
        self.assertIn("torch bf16 eager failed", text)
        self.assertNotIn("| torch f32 eager |", text)

    def test_growth_is_relative_to_the_first_point(self):
        def run(seconds):
            return {"training": {"step_seconds": seconds}}

        results = {
            "dreamc depth 4": [run(0.1), run(0.2), run(0.15)],
            "dreamc depth 8": [run(0.3)],
            "torch depth 4": [run(0.45)],
            "torch depth 8": [{}],
        }
        text = bench.growth(results)
        self.assertIn("| depth | 4 | 150 | 1.00 × | 450 | 1.00 × | 3.00 × |", text)
        self.assertIn("| depth | 8 | 300 | 2.00 × |  |  |  |", text)


if __name__ == "__main__":
    unittest.main()
