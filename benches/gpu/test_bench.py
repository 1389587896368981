"""What of the script needs no GPU: `python benches/gpu/test_bench.py`."""

import array
import contextlib
import io
import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

import bench
import decode


class Bench(unittest.TestCase):
    def test_the_plan_names_every_part(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(bench.main(["--plan"]), 0)
        for name in ("calibration", "losses_ptx", "dreamc_la-16", "torch_dr-da-16", "count_la-16"):
            self.assertIn(f": {name}: ", out.getvalue())
        self.assertRegex(out.getvalue(), r"generated_la-16: env DREAMC_CUBLASLT=0 \S+ bench ")

    def parts(self, *more):
        return list(bench.parts(bench.arguments(["--tests", "elsewhere", *more])))

    def test_what_is_right_comes_before_what_is_fast(self):
        parts = self.parts()
        names = [name for _, name, *_ in parts]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual([call for call, *_ in parts], sorted(call for call, *_ in parts))
        # What may wait for ever is asked first of a GPU, and not for long.
        first = next(p for p in parts if p[1] == "hopper")
        self.assertEqual([p[1] for p in parts if p[0] == 1][2], "hopper")
        self.assertEqual([p[1] for p in parts if p[0] == 1][:2], ["versions", "doctor"])
        self.assertEqual(first[4], 60)
        self.assertTrue(all(call == 3 for call, name, *_ in parts if name.startswith(("torch", "eager", "floor", "launched"))))

    def test_a_call_is_its_own_parts_and_what_needs_no_gpu(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            bench.main(["--plan", "--call", "2"])
        calls = {line.split(":")[0] for line in out.getvalue().splitlines()}
        self.assertEqual(calls, {"before", "fast"})

    def test_a_pack_has_programs_without_symbols_and_compiled_kernels(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            bench.main(["--plan", "--pack", "pack", "--tests", "built"])
        self.assertRegex(out.getvalue(), r"strip_gpu: strip -o \S+/pack/gpu \S+/built/gpu")
        self.assertRegex(out.getvalue(), r"compile_la-16: env DREAMC_CACHE=\S+/pack/cache .*--emit cubin .*--target h200")

    def test_gradients_are_compared_by_their_lengths(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)

            def write(name, tensors):
                header, data = {"__metadata__": {"format": "dreamc probe"}}, b""
                for key, values in tensors.items():
                    raw = array.array("f", values).tobytes()
                    header[key] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
                    data += raw
                text = json.dumps(header).encode()
                (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)
                return str(folder / name)

            one = write("one", {"loss": [2.0], "gradients.w": [3.0, 4.0], "gradients.none": [1e-9]})
            near = write("near", {"loss": [2.0], "gradients.w": [3.0, 4.05], "gradients.none": [-1e-9]})
            lost = write("lost", {"loss": [2.0], "gradients.w": [3.0, math.nan], "gradients.none": [0.0]})
            found = bench.agree(one, near)
            self.assertEqual((found["tensors"], found["worst"]), (3, "gradients.w"))
            self.assertAlmostEqual(found["apart"], 0.05 / math.hypot(3, 4.05), places=5)
            for other, code in ((near, 0), (lost, 1)):
                with contextlib.redirect_stdout(io.StringIO()):
                    self.assertEqual(bench.main(["--agree", one, other]), code)

    def test_utilisation(self):
        self.assertAlmostEqual(bench.utilisation(1e5, 3e9, 1e15), 0.3)
        self.assertEqual(bench.peak("NVIDIA H200"), 989.4e12)
        self.assertIsNone(bench.peak("something else"))

    def test_json_at_the_end_of_other_words(self):
        self.assertEqual(bench.last_json('compiling\n{"a": {"b": 1}}\n'), {"a": {"b": 1}})
        self.assertEqual(bench.last_json('{\n "a": 1\n}'), {"a": 1})
        with self.assertRaises(ValueError):
            bench.last_json("nothing")

    def quiet(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()):
            return bench.run(*arguments)

    def test_a_part_that_fails_is_reported_and_one_without_means_is_skipped(self):
        results = {
            "bad": self.quiet("bad", ["python3", "-c", "raise SystemExit(3)"], [], 60),
            "good": self.quiet("good", ["python3", "-c", "print('{\"tokens\": 10}')"], [], 60),
            "absent": self.quiet("absent", ["no-such-program"], [], 60),
            "late": self.quiet("late", ["python3", "-c", "print(1, flush=True); import time; time.sleep(60)"], [], 1),
        }
        self.assertEqual(results["good"]["json"], {"tokens": 10})
        self.assertIn("stopped after 1 s", results["late"]["tail"])
        if not bench.gpu():
            results["far"] = self.quiet("far", ["python3"], ["gpu"], 60)
        text = bench.report(results, "")
        self.assertIn("| bad | failed (3) |", text)
        self.assertIn("| good | ok |", text)
        self.assertIn("| absent | failed (127) |", text)
        self.assertIn("| late | failed (124) |", text)
        if not bench.gpu():
            self.assertIn("| far | skipped: no GPU", text)

    def test_what_is_done_is_kept_and_not_done_again(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            calls = out / "calls"
            program = out / "dreamc"
            program.write_text(f"#!/bin/sh\necho $1 >> {calls}\necho '{{\"flops_per_token\": {{}}}}'\n")
            program.chmod(0o755)
            line = ["--out", str(out / "results"), "--work", str(out / "work"), "--dreamc", str(program), "--only", "count_"]
            for minutes in ("0", "1", "1"):
                with contextlib.redirect_stdout(io.StringIO()):
                    self.assertEqual(bench.main(line + ["--minutes", minutes]), 0)
                if minutes == "0":
                    self.assertIn("no time left", (out / "results" / "report.md").read_text())
            self.assertEqual(calls.read_text().split(), ["count", "count"])
            self.assertEqual(sorted(p.name for p in (out / "results").iterdir()), ["report.md", "results.json"])

    def test_what_failed_comes_behind_what_nobody_tried(self):
        chosen = [(1, name, [], [], 60) for name in ("done", "failed", "skipped", "new")]
        results = {"done": {"code": 0}, "failed": {"code": 124}, "skipped": {"skipped": "no time left"}}
        self.assertEqual([p[1] for p in bench.untried_first(chosen, results)], ["skipped", "new", "failed"])

    def test_the_page_says_what_doctor_found(self):
        line = {"model": "quickstart", "kernel": "product", "shape": "16 x 16", "origin": "q", "launch": 1}
        ran = {"outcome": "ran", "error": 1e-6, "bound": 1e-3, "buffer": "q", "seconds": 2e-6}
        lines = [line | ran | {"rung": "warpgroups", "right": True, "share": 0.25}, line | ran | {"rung": "naive", "right": True, "share": 0.01}]
        lines.append(line | {"rung": "plain", "right": False, "share": None, "outcome": "faults", "why": "an illegal | address\nwas met"})
        found = {"device": "a card", "driver": "13.0", "nvrtc": "13.0", "kernels": 3, "wrong": 1, "lines": lines}
        text = bench.report({"doctor": {"skipped": None, "code": 1, "json": found}}, "a card")
        self.assertIn("3 kernels on a card, driver 13.0, NVRTC 13.0; 1 wrong.", text)
        self.assertIn("| product | quickstart | plain | 16 x 16 |  |  |  | an illegal / address was met |", text)
        self.assertIn("| product | quickstart | warpgroups | 16 x 16 | 2.0 | 25 % | 1.0e-06 | ran |", text)
        self.assertNotIn("| naive |", text)

    def test_decoding_stands_beside_vllms(self):
        found = [{"sequences": 1, "tokens_per_second": 1234.0}, {"sequences": 8, "tokens_per_second": 9000.4}]
        results = {f"{key}_llama-3.2-1b": {"skipped": None, "code": 0, "json": dict(zip(("decoding", "decoding_eight"), found))} for key in ("vllm", "decoded")}
        text = bench.report(results, "")
        for who in ("dreamc", "vLLM"):
            self.assertIn(f"| llama-3.2-1b | {who} | 8 | 9,000 |", text)
        names = [name for _, name, _, needs, _ in self.parts() if "vllm" in needs]
        self.assertEqual(names, ["vllm_llama-3.2-1b"])
        self.assertEqual(decode.rate(0.5, 1.5, 8, 129), 1024)

    def test_packed_weights_have_their_rates(self):
        reading = {"format": "q4_k", "rows": 1, "bytes": 33030144, "seconds": 1e-5, "bytes_per_second": 3.3e12}
        one = {"sequences": 1, "tokens_per_second": 700.0, "prompt_tokens_per_second": 9000.0, "weights_per_second": 4e11}
        good = {"skipped": None, "code": 0}
        parts = {"blocks": good | {"json": {"readings": [reading]}}, "blocks_q4_k": good | {"json": {"decoding": one, "decoding_eight": None}}}
        text = bench.report(parts, "a card")
        self.assertIn("| q4_k | 1 | 10.0 | 3,300 |", text)
        self.assertIn("| q4_k | 1 | 700 | 9,000 | 400 |", text)
        names = [name for _, name, *_ in self.parts() if name.startswith("blocks")]
        self.assertEqual(names, ["blocks", "blocks_bf16", "blocks_q8_0", "blocks_q4_k"])

    def test_recurrences_have_times_of_one_layer(self):
        launches = [
            {"kernel": "linear_attention 8x4096", "seconds": 0.002, "count": 2},
            {"kernel": "linear_attention_grad 8x4096", "seconds": 0.006, "count": 2},
        ]
        found = {"training": {"tokens_per_second": 750000.0, "launches": launches}}
        text = bench.report({"recurrent_delta": {"skipped": None, "code": 0, "json": found}}, "a card")
        self.assertIn("| delta | 750,000 | 1.00 | 3.00 |", text)

    def test_first_contact_is_all_calls_in_half_an_hour(self):
        script = bench.HERE / "first-contact"
        out = subprocess.run([sys.executable, str(script), "--plan"], capture_output=True, text=True, check=True).stdout
        order = [line.split(": ")[1] for line in out.splitlines() if line.split(": ")[0] in bench.CALLS]
        places = [order.index(name) for name in ("doctor", "calibration", "dreamc_la-16", "torch_la-16", "decoded_llama-3.2-1b", "vllm_llama-3.2-1b")]
        self.assertEqual(places, sorted(places))

    def test_the_table(self):
        training = {"tokens_per_second": 1e5, "memory": {"total": 2e9}, "launches": []}
        training["launches"] = [{"origin": "head", "kernel": "product", "count": 2, "seconds": 1e-3, "flops": 5e11}]
        for library, seconds, reason in ((True, 3e-4, "3.0 µs, generated 4.0 µs"), (False, 1e-4, "1.0 µs, library 2.0 µs")):
            choice = {"library": library, "reason": reason}
            training["launches"].append({"origin": "q", "kernel": "product", "count": 1, "seconds": seconds, "flops": 0, "choice": choice})
        good = {"skipped": None, "code": 0}
        results = {
            "losses_cpu": good | {"losses": [2.0]},
            "losses_ptx": good | {"losses": [2.002]},
            "count_la-16": good | {"json": {"flops_per_token": {"training": 3e9}}},
            "dreamc_la-16": good | {"json": {"training": training, "decoding": None, "ceiling": {"bf16": 6e14}}},
            "written_la-16": good | {"json": {"training": training, "decoding": {"tokens_per_second": 70}}},
            "gradients_floor": good | {"json": {"tensors": 9, "worst": "gradients.q", "apart": 2e-3}},
            "generated_la-16": good | {"json": {"training": training | {"tokens_per_second": 9e4}}},
            "torch_la-16": good | {"json": {"training": {"tokens_per_second": 5e4}, "peak_memory": 3e9, "decoding": None}},
        }
        text = bench.report(results, "NVIDIA H100 80GB")
        self.assertIn("| la-16 | dreamc | 100,000 | 30.3 % | 2.0 | 70 |", text)
        self.assertIn("| la-16 | torch | 50,000 | 15.2 % | 3.0 |  |", text)
        self.assertIn("| la-16 | generated | 90,000 | 27.3 % | 2.0 |  |", text)
        self.assertIn("| la-16 | head | product | 2 | 1.000 | 71.4 % | 500.0 | 51 % |  |", text)
        self.assertIn("| la-16 | q | product | 1 | 0.300 | 21.4 % |  |  | cuBLASLt: 3.0 µs, generated 4.0 µs |", text)
        self.assertIn("| 7.1 % |  |  | generated: 1.0 µs, library 2.0 µs |", text)
        self.assertIn("cuBLASLt computes 1 of 2 plain products of la-16, 75 % of their time.", text)
        self.assertIn("600 TFLOP/s", text)
        self.assertIn("Gradients by Hopper's kernels against those of every GPU: 2.0e-03 apart at most (gradients.q).", text)
        self.assertIn("ptx against cpu: 1.0e-03", text)


if __name__ == "__main__":
    unittest.main()
