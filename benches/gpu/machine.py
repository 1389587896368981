#!/usr/bin/env python3
"""What the machine code of kernels is made of, without a GPU:

    dreamc compile examples/dr-da-16.yaml --emit cuda --architecture sm_90a --precision bf16 --batch 8 --sequence 4096 --target h200 > kernels.cu
    python benches/gpu/machine.py kernels.cu --only 'grouped|attention|head|product'

NVRTC (`DREAMC_NVRTC`, or the environment that Python runs in) compiles each distinct text with the blocks of `kernels/` (`--kernels`
names those of another tree, to compare), and `nvdisasm` (`pip install nvidia-cuda-nvdisasm`, in the same environment or on the path)
takes it apart; where there is none, PTX is counted and said to be. A line for each entry:

registers   of a thread at its start, and bytes spilled
code        instructions, all of them
branches    those that lanes may take apart, with their meeting points: a chain of them is one dependent piece after another
loads       of global memory, and how often a run of them ends with a store or a branch: so many round trips to memory follow one
            another at most
barriers    of the block
products    of tensor cores
"""

import argparse
import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEAD = ("registers", "spilled", "code", "branches", "loads", "trips", "stores", "barriers", "products")


def environments():
    """Folders that may hold NVIDIA's packages."""
    named = os.environ.get("DREAMC_NVRTC") or os.environ.get("VIRTUAL_ENV")
    roots = [pathlib.Path(p) for p in ([named] if named else []) + sys.path if p]
    return [found for root in roots for found in [root, *root.glob("lib/python*/site-packages")] if (found / "nvidia").is_dir()]


class Nvrtc:
    """The compiler, through its C interface."""

    def __init__(self):
        folders = [lib for at in environments() for lib in at.glob("nvidia/*/lib")]
        libraries = [f for folder in folders for f in sorted(folder.glob("libnvrtc.so*"))]
        if not libraries:
            raise SystemExit("no NVRTC: pip install nvidia-cuda-nvrtc, and name the environment by DREAMC_NVRTC")
        for builtins in libraries[0].parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(libraries[0]))

    def of(self, what, program):
        """The log, the PTX or the cubin of a program."""
        size = ctypes.c_size_t()
        self.library[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self.library[f"nvrtcGet{what}"](program, text)
        return text.raw

    def compile(self, text, headers, architecture):
        """The code and what `ptxas` says of it."""
        names = sorted(headers)
        many = ctypes.c_char_p * len(names)
        program = ctypes.c_void_p()
        sources = many(*[headers[n].encode() for n in names])
        self.library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"kernel.cu", len(names), sources, many(*[n.encode() for n in names])
        )
        options = [f"--gpu-architecture={architecture}".encode(), b"--ptxas-options=-v"]
        failed = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = self.of("ProgramLog", program).decode(errors="replace")
        if failed:
            raise SystemExit(f"{text}\n{log}")
        return self.of("PTX", program), self.of("CUBIN", program), log


def disassembler():
    """`nvdisasm`, or nothing."""
    found = [f for at in environments() for f in at.glob("nvidia/*/bin/nvdisasm")]
    return shutil.which("nvdisasm") or next((str(f) for f in found if os.access(f, os.X_OK)), None)


def texts(all_of_them):
    """Name and text of each kernel of `--emit cuda`."""
    for part in re.split(r"(?m)^(?=// \w+\n#include)", all_of_them):
        named = re.match(r"// (\w+)\n", part)
        if named:
            yield named[1], part


def entries(code):
    """Instructions of each entry of machine code, or of PTX, without their predicates."""
    found, name = {}, None
    for line in code.splitlines():
        begins = re.match(r"\s*\.text\.(\w+):|\s*\.visible \.entry (\w+)", line)
        if begins:
            name = begins[1] or begins[2]
            found[name] = []
        elif line.strip().startswith(".section"):
            name = None
        instruction = re.match(r"\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?[\w%]+\s+)?([A-Za-z][\w.]*)\b.*;", line)
        if name and instruction:
            found[name].append(instruction[1])
    return found


def counted(operations):
    """The counts of an entry: of SASS, whose names are capitals, or of PTX."""
    kinds = {
        "branches": r"BRA|BSSY|BSYNC|BREAK|bra\b|bra\.",
        "loads": r"LDG\b|LDG\.|ld\.global",
        "stores": r"STG|st\.global",
        "barriers": r"BAR\.(SYNC|ARV)|bar\.|barrier\.",
        "products": r"HGMMA|HMMA|wgmma\.mma|mma\.",
    }
    counts = {kind: sum(bool(re.match(of, o)) for o in operations) for kind, of in kinds.items()}
    trips, loading = 0, False
    for o in operations:
        if re.match(kinds["loads"], o):
            trips, loading = trips + (not loading), True
        elif re.match(kinds["stores"], o) or re.match(kinds["branches"], o):
            loading = False
    return {"code": sum(o not in ("NOP",) for o in operations), "trips": trips} | counts


def registers(log):
    """Registers and spilled bytes by entry."""
    of = r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    return {name: (int(used), int(stored) + int(loaded)) for name, stored, loaded, used in re.findall(of, log, re.S)}


def table(rows):
    """Markdown."""
    lines = ["| kernel | entry | " + " | ".join(HEAD) + " |", "|---|---|" + "---|" * len(HEAD)]
    return "\n".join(lines + [f"| {name} | {entry} | " + " | ".join(str(counts[h]) for h in HEAD) + " |" for name, entry, counts in rows])


def main(argv=None):
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("texts", type=pathlib.Path, help="what `dreamc compile --emit cuda` printed")
    a.add_argument("--only", default=".", help="kernels whose names match this regular expression")
    a.add_argument("--architecture", default="sm_90a")
    a.add_argument("--kernels", type=pathlib.Path, default=ROOT / "kernels", help="the folder of building blocks")
    a = a.parse_args(argv)
    nvrtc, nvdisasm = Nvrtc(), disassembler()
    headers = {f.name: f.read_text() for f in a.kernels.glob("*.cuh")}
    rows, seen = [], set()
    for name, text in texts(a.texts.read_text()):
        body = text.split("\n", 1)[1]
        if not re.search(a.only, name) or body in seen:
            continue
        seen.add(body)
        ptx, cubin, log = nvrtc.compile(text, headers, a.architecture)
        if nvdisasm:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(cubin)
                file.flush()
                code = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
        else:
            code = ptx.decode(errors="replace")
        used = registers(log)
        for entry, operations in entries(code).items():
            of = used.get(entry, ("?", "?"))
            rows.append((name, entry, counted(operations) | {"registers": of[0], "spilled": of[1]}))
    print(table(rows))
    print("\nCounted in machine code." if nvdisasm else "\nNo nvdisasm: counted in PTX, registers by ptxas.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
