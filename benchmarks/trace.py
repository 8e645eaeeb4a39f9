#!/usr/bin/env python3
"""When the blocks of a recorded GPU step start, wait and end.

`trace.py instrument FOLDER` copies crates/cuda/kernels to FOLDER with stamps: every block of
every kernel writes down when it started, when the kernel before it had ended (the return of
`griddepcontrol.wait`) and when the block's last warp ended, by `%globaltimer`, with its
multiprocessor. Measure with those kernels:

    CUDA_KERNELS=FOLDER steps HOLES --formats affine4-g64 --trace 1 gemma4-31b

`trace.py draw HOLES/gemma4-31b-affine4-g64.trace PICTURE.svg [--kernels N] [--skip N]` prints
the kernels of the last whole step, with the time that each adds to it, and draws N of them. A
kernel's time runs from the end of the kernel before it to its own last block's end, so the
times add up to the step; kinds below half a percent are left out. Stamps take time themselves,
about 0.7 us a kernel: compare the sum with the step's time without them.
"""
import argparse
import re
import shutil
import struct
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

RECORDS = 1 << 16
RECORD = struct.Struct("<5Q")  # grid, start, ready, end, block | multiprocessor << 32

STAMPS = """
// ---- stamps of benchmarks/trace.py
__device__ struct { u64 count; u64 records[%d][5]; } trace_records;
__shared__ u64 trace_start, trace_ready;
__shared__ u32 trace_ended;
__device__ __forceinline__ u64 trace_now() {
    u64 t;
    asm volatile("mov.u64 %%0, %%globaltimer;" : "=l"(t));
    return t;
}
struct TraceScope {
    __device__ __forceinline__ TraceScope() {
        if (threadIdx.x == 0) {
            trace_start = trace_now();
            trace_ready = 0;
            trace_ended = 0;
        }
        __syncthreads();
    }
    __device__ __forceinline__ ~TraceScope() {
        __syncwarp();
        if (threadIdx.x %% 32) return;
        if (atomicAdd(&trace_ended, 1) + 1 < (blockDim.x + 31) / 32) return;
        const u64 at = atomicAdd(&trace_records.count, 1ull) %% %d;
        u64 grid;
        u32 sm;
        asm volatile("mov.u64 %%0, %%gridid;" : "=l"(grid));
        asm volatile("mov.u32 %%0, %%smid;" : "=r"(sm));
        trace_records.records[at][0] = grid;
        trace_records.records[at][1] = trace_start;
        trace_records.records[at][2] = trace_ready;
        trace_records.records[at][3] = trace_now();
        trace_records.records[at][4] = blockIdx.y * gridDim.x + blockIdx.x | (u64) sm << 32;
    }
};
""" % (RECORDS, RECORDS)


def instrument_file(text):
    """A stamp's scope at the start of every kernel's body."""
    out, at = [], 0
    for match in re.finditer(r"^(?!#define KERNEL).*?\bKERNEL\b", text, re.M):
        at_body = body(text, match.end())
        out.append(text[at:at_body] + " TraceScope trace_scope;")
        at = at_body
    return "".join(out) + text[at:]


def body(text, at):
    """Where the body of the kernel whose head begins at `at` begins: after the parameters,
    the last pair of parentheses before a brace."""
    while True:
        at = text.index("(", at)
        depth = 0
        while True:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
            if depth == 0:
                break
        rest = re.match(r"\s*\{", text[at:])
        if rest:
            return at + rest.end()


def instrument(folder):
    kernels = Path(__file__).parent.parent / "crates/cuda/kernels"
    folder.mkdir(parents=True, exist_ok=True)
    for path in kernels.iterdir():
        if path.suffix not in (".cu", ".cuh"):
            continue
        text = path.read_text()
        if path.name == "common.cuh":
            head = text.index("// Lets the next kernel")
            wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
            mark = wait + "\n    if (threadIdx.x == 0) trace_ready = trace_now();"
            text = text[:head] + STAMPS + text[head:].replace(wait, mark)
        elif path.suffix == ".cu":
            text = instrument_file(text)
        (folder / path.name).write_text(text)


def read(path):
    """Every record: (kernel, grid, start, ready, end, block, multiprocessor), in ns."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        end = data.index(b"\n", at)
        size, kernel = data[at:end].decode().split("\t")
        start = end + 1
        count = struct.unpack_from("<Q", data, start)[0]
        for i in range(min(count, RECORDS)):
            grid, begun, ready, done, where = RECORD.unpack_from(data, start + 8 + i * RECORD.size)
            found.append((kernel, grid, begun, ready or begun, done, where & 0xFFFFFFFF, where >> 32))
        at = start + int(size)
    return found


def last_step(records):
    """Records of the last whole step: between the last two times when nothing ran for long."""
    records.sort(key=lambda r: r[2])
    cuts, busy = [0], records[0][4]
    for i, record in enumerate(records):
        if record[2] > busy + 10_000:
            cuts.append(i)
        busy = max(busy, record[4])
    steps = [records[a:b] for a, b in zip(cuts, cuts[1:] + [len(records)])]
    most = max(len(s) for s in steps)
    return [s for s in steps if len(s) > most // 2][-1]


def launches(records):
    """Kernels in the order in which they ran, each with its blocks."""
    grids = defaultdict(list)
    for record in records:
        grids[record[:2]].append(record)
    found = []
    for (kernel, _), blocks in grids.items():
        # A grid's number may come again: parts far from each other are launches of their own.
        blocks.sort(key=lambda r: r[5])
        seen = defaultdict(int)
        parts = defaultdict(list)
        for block in sorted(blocks, key=lambda r: r[2]):
            parts[seen[block[5]]].append(block)
            seen[block[5]] += 1
        found += [(kernel, part) for part in parts.values()]
    found.sort(key=lambda launch: (min(r[3] for r in launch[1]), min(r[2] for r in launch[1])))
    return found


def report(found):
    """Prints what each kind of kernel, told apart by its neighbours, adds to the step, and
    returns the kernels' spans."""
    spans, end = [], None
    for kernel, blocks in found:
        start, ready = min(r[2] for r in blocks), min(r[3] for r in blocks)
        ends = sorted(r[4] for r in blocks)
        name = kernel.split("::")[1].split(" ")[0]
        end = end or ready
        times = (max(0, ends[-1] - end), ready - end, ends[-1] - ready, ends[-1] - ends[len(ends) // 2], ready - start)
        spans.append((name, start, ready, ends, len(blocks), times))
        end = max(end, ends[-1])
    names = ["", *(s[0] for s in spans), ""]
    kinds = defaultdict(list)
    for before, span, after in zip(names, spans, names[2:]):
        kinds[span[0], span[4], before, after].append(span[5])
    whole = (spans[-1][3][-1] - spans[0][1]) / 1e3
    print(f"{len(spans)} kernels in {whole:.1f} us. All times are medians in us.")
    print()
    print("| kernel × blocks | after, before | launches | adds to the step | of it, until its first block goes on | last block's end after the median block's | blocks wait, from the first one's start |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for (name, blocks, before, after), times in sorted(kinds.items(), key=lambda k: -sum(t[0] for t in k[1])):
        adds, gap, _, tail, waits = (median(x) / 1e3 for x in zip(*times))
        if sum(t[0] for t in times) > whole * 5:
            print(f"| {name} × {blocks} | {before}, {after} | {len(times)} | {adds:.1f} | {gap:.1f} | {tail:.1f} | {waits:.1f} |")
    return spans


def draw(spans, path):
    """A row a kernel: on the device before its go (light), working (dark), ends of blocks (ticks)."""
    first, last = min(s[1] for s in spans), max(s[3][-1] for s in spans)
    width, height, left = 1100, 22, 190
    scale = (width - left - 20) / (last - first)
    x = lambda t: left + (t - first) * scale
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * len(spans) + 46}" font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>']
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if (last - first) / 1e3 / s < 16)
    for us in range(0, int((last - first) / 1e3) + 1, step):
        at = x(first + us * 1e3)
        out.append(f'<line x1="{at:.1f}" y1="16" x2="{at:.1f}" y2="{height * len(spans) + 20}" stroke="#ddd"/><text x="{at:.1f}" y="12" text-anchor="middle" fill="#555">{us}</text>')
    for i, (name, start, ready, ends, blocks, _) in enumerate(spans):
        y = 20 + i * height
        out.append(f'<text x="{left - 6}" y="{y + 14}" text-anchor="end">{name} × {blocks}</text>')
        out.append(f'<rect x="{x(start):.1f}" y="{y + 3}" width="{max(0.5, x(ready) - x(start)):.1f}" height="{height - 6}" fill="#bcd3ea"/>')
        out.append(f'<rect x="{x(ready):.1f}" y="{y + 3}" width="{max(0.5, x(ends[-1]) - x(ready)):.1f}" height="{height - 6}" fill="#3b78b5"/>')
        ticks = "".join(f"M{at / 2:g} {y + 3}v6" for at in sorted({round(2 * x(end)) for end in ends}))
        out.append(f'<path d="{ticks}" stroke="#f2a33a" stroke-width="0.6"/>')
    out.append(f'<text x="{left}" y="{height * len(spans) + 38}" fill="#555">us; light: blocks wait for the kernel before; dark: they work; orange: a block ends</text></svg>')
    path.write_text("\n".join(out) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("instrument")
    command.add_argument("folder", type=Path)
    command = commands.add_parser("draw")
    command.add_argument("trace", type=Path)
    command.add_argument("picture", type=Path)
    command.add_argument("--kernels", type=int, default=24)
    command.add_argument("--skip", type=int, default=200)
    args = parser.parse_args()
    if args.command == "instrument":
        instrument(args.folder)
    else:
        spans = report(launches(last_step(read(args.trace))))
        draw(spans[args.skip : args.skip + args.kernels], args.picture)


if __name__ == "__main__":
    sys.exit(main())
