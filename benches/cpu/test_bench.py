"""What of the script needs neither PyTorch nor a built dreamc: `python benches/cpu/test_bench.py`."""

import contextlib
import io
import pathlib
import struct
import tempfile
import unittest

import bench
import llama


class Bench(unittest.TestCase):
    def test_every_variant_is_planned_and_every_spec_exists(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(bench.main(["--plan"]), 0)
            self.assertEqual(bench.main(["--plan", "--scaling"]), 0)
        names = ("a: dreamc f32 @avx2:", "d, written: dreamc @avx512:", "e, written: llama.cpp bf16:")
        for name in names + ("a: dreamc bf16:", "d: torch f32 compiled:", "c: torch bf16 compiled grouped:", "dreamc depth 16"):
            self.assertIn(name, out.getvalue())
        for model in [*bench.MODELS, *bench.WRITTEN]:
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
        self.assertIn("| a | dreamc f32 | 200 | 2.06 × (1.11 – 3.00) | 50 |  | 50 % |", text)
        self.assertIn("torch bf16 eager failed", text)
        self.assertNotIn("| torch f32 eager |", text)

    def test_what_cannot_be_the_best_runs_no_more(self):
        def run(rate):
            return [{"training": {"tokens_per_second": rate}}]

        runs = {"dreamc f32": run(9), "torch f32 eager": run(60), "torch bf16 eager": run(71), "torch f32 compiled": run(100)}
        runs |= {"torch f32 eager @avx2": run(40), "torch f32 compiled @avx2": [{}]}
        slow = {("a", "torch f32 eager"), ("a", "torch f32 compiled @avx2")}
        self.assertEqual(bench.behind({"a": runs}), slow)

    def test_writing_is_compared_with_reading_and_with_llama(self):
        def run(rate, **more):
            decoding = {"tokens_per_second": rate, "weights_per_second": rate * 2e8, "read": 1e10 + rate * 1e8}
            return {"decoding": decoding, **more}

        mine = [run(50, decoding_eight={"tokens_per_second": 300}), run(60), run(40)]
        text = bench.report({"d, written": {"dreamc": mine, "llama.cpp bf16": [run(25), run(40), {}]}})
        self.assertIn("| d, written | dreamc | 50.0 | 10.0 | 15.0 | 67 % (57 – 75) | 6.0 × | 1.75 × (1.50 – 2.00) |", text)

    def test_a_gguf_file_is_as_long_as_it_says(self):
        shape = (8, 2, 2, 4, 16, 40)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "x.gguf"
            llama.write(path, shape, 32)
            data = path.read_bytes()
        self.assertEqual(data[:4], b"GGUF")
        self.assertEqual(struct.unpack_from("<IQQ", data, 4), (3, 2 + 9 * 2, 19))
        sizes = [columns * 4 if rows is None else rows * columns * 2 for _, rows, columns in llama.tensors(shape)]
        rest = sum(size + -size % 32 for size in sizes)
        self.assertEqual((len(data) - rest) % 32, 0)

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
