"""The emulator of SM100 kernels, without a GPU: what it writes, what it refuses, what products are."""

import ctypes
import re
import runpy
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.emulator import __main__ as command
from lab.emulator import build, hook, mailbox
from lab.emulator.translate import RefusedError, Translation, translate
from tests.lib.compiled import code_for
from tests.lib.configurations import LONG, backward, chosen
from tests.lib.tiers import tiered

ROOT = Path(__file__).parents[2] / "lab" / "emulator"
HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"
REGISTERS = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .f32 %f<99>; .reg .b64 %rd<99>;"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], %r2;"


def module(*instructions: str) -> str:
    return f"{HEAD}.visible .entry kernel()\n{{\n{REGISTERS}\n" + "\n".join(instructions) + "\nret;\n}\n"


def runtime_declarations() -> str:
    """The functions of ``runtime.cu`` that translated code calls, as what they take and give."""
    kinds = {"uint32_t": ".b32", "uint64_t": ".b64"}
    found = re.findall(
        r"^__device__ __noinline__ (\w+) (sm100_\w+)\(([^)]*)\)", (ROOT / "runtime.cu").read_text(), re.M
    )
    assert len(found) == 8
    text = ""
    for result, name, parameters in found:
        taken = [f".param {kinds[kind]} p{i}" for i, kind in enumerate(re.findall(r"uint\d+_t", parameters))]
        given = "" if result == "void" else f"(.param {kinds[result]} r) "
        text += f".extern .func {given}{name}({', '.join(taken)});\n"
    return text


def ptxas() -> str:
    triton = pytest.importorskip("triton", reason="needs ptxas, which triton brings")
    return str(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")


def assembled(translation: Translation, folder: Path) -> str:
    """Output of the assembler for Hopper, which has to take translated code."""
    source = folder / "kernel.ptx"
    head = ".version 8.6\n.target sm_90a\n.address_size 64\n"
    source.write_text(head + runtime_declarations() + translation.body)
    command: list[str | Path] = [ptxas(), "-arch=sm_90a", "-c", "-v", "-o", folder / "kernel.o", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


REGISTER_LISTS = {n: "{" + ", ".join(f"%r{i}" for i in range(10, 10 + n)) + "}" for n in (1, 16, 32)}
TRANSLATED = {
    "f32x2": "fma.rn.ftz.f32x2 %rd1, %rd2, %rd3, %rd1;",
    "guarded f32x2": "@!%p1 add.rm.f32x2 %rd1, %rd2, %rd3;",
    "alloc": ALLOC,
    "dealloc": "@%p2 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r1, 512;",
    "relinquish": "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    "ld": f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {REGISTER_LISTS[32]}, [%r1+64];",
    "ld of one": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r1];",
    "st": f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r1], {REGISTER_LISTS[16]};",
    "waits and fences": "tcgen05.wait::ld.sync.aligned; tcgen05.wait::st.sync.aligned; "
    "tcgen05.fence::after_thread_sync;",
    "mma": "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, 0;",
    "mma of a pair": "tcgen05.mma.cta_group::2.kind::f16.collector::a::discard [%r1], [%r3+8], %rd2, %r2, "
    "{%r4, %r4, %r4, %r4, %r4, %r4, %r4, %r4}, !%p1;",
    "commit": "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+8];",
    "multicast commit": "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
    "[%r1], %rs1;",
    "commit to given CTAs": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
    "[%r1], 1;",
    "wait": f"{ALLOC} {{ LAB: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 1, 10000000; @!%p1 bra LAB; }}",
    "poll": f"{ALLOC} mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], %r2;",
    "registers": f"{ALLOC} setmaxnreg.inc.sync.aligned.u32 192;",
    "TMA of a pair": "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 "
    "[%r1], [%rd1, {%r2, %r3}], [%r4];",
}


@pytest.mark.parametrize("instruction", TRANSLATED.values(), ids=TRANSLATED)
def test_hopper_takes_what_is_written(instruction: str, tmp_path: Path) -> None:
    translation = translate(module(instruction))
    assert not re.search(r"tcgen05|f32x2|cta_group|setmaxnreg", translation.body)
    assert sum(translation.replaced.values()) == instruction.count(";") - ("LAB" in instruction)
    assert translation.emulated == (("kernel",) if ALLOC in instruction else ())
    assembled(translation, tmp_path)


def test_all_else_stays() -> None:
    text = module(
        "add.f32 %f1, %f2, %f3; // tcgen05.mma", "max.f32 %f1, %f2, %f3;", "setmaxnreg.dec.sync.aligned.u32 24;"
    )
    text += ".visible .entry other() { .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [0], 1, 9; ret; }"
    assert translate(text) == Translation(text.removeprefix(HEAD[:-1]), {}, ())


REFUSED = {
    "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;": "tcgen05.cp.cta_group::1.128x256b: not emulated",
    "tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r1, %r2, %r3, %r4}, [%r5];": "16x256b.x1.b32: not emulated",
    "tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%r1, %r2}, [%r5];": "pack::16b.b32: not emulated",
    "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2}, [%r5];": "expected 4 registers, got 2",
    "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %rd1, %rd2, %r2, 0;": "kind::f8f6f4: not emulated",
    "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, 0;": "not emulated",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1, 3;": "expected a predicate",
    "tcgen05.shift.cta_group::1.down [%r1];": "not emulated",
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];": "not emulated",
    "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.cta_group::2 "
    "[%r1], [%rd1, {%r2}], [%r3], %rs1;": "not with multicast",
    f"{ALLOC}\nmbarrier.try_wait.shared.b64 %p1, [%r1], %rd1;": "only with .parity",
}


@pytest.mark.parametrize(("instruction", "message"), REFUSED.items(), ids=REFUSED.values())
def test_what_is_not_emulated_is_refused(instruction: str, message: str) -> None:
    with pytest.raises(RefusedError, match=rf"^line [78]: .*{re.escape(message)}"):
        translate(module(instruction))


def test_other_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target: expected one of sm_100a, .*, got sm_90a"):
        translate(module().replace("sm_100a", "sm_90a"))


def test_the_runtime_compiles() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    translation = translate(module(*TRANSLATED.values()).replace("LAB", "LAB_WAIT"))
    assert build.assemble(build.runtime() + translation.body).startswith(b"\x7fELF")


def test_faults_have_the_numbers_of_the_runtime() -> None:
    names = re.search(r"enum Fault : uint32_t \{(.*?)\}", (ROOT / "runtime.cu").read_text(), re.S)
    assert names is not None
    assert len(re.findall(r"\bk[A-Z]\w+", names[1])) == len(mailbox.FAULTS) == max(mailbox.FAULTS)
    assert f"{mailbox.ADDRESS:#x}" in (ROOT / "runtime.cu").read_text()


def test_faults_are_reported_once() -> None:
    page = mailbox.mailbox()
    assert page.take_faults() == []
    record = struct.pack("<9I", 5, 1, 2, 3, 40, 77, 0x200010, 32, 0)
    ctypes.memmove(mailbox.ADDRESS + 4 * (16 + 16), record, len(record))
    (fault,) = page.take_faults()
    assert str(fault).startswith("PTX line 77, CTA (1, 2, 3), thread 40: lanes of address 0x200010")
    assert page.take_faults() == []


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Products and the queue of an SM, compiled for this machine."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library, sources = tmp_path_factory.mktemp("host") / "host.so", ROOT / "on_host"
    command: list[str | Path] = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-w", "-o", library]
    command += [f"-I{ROOT}", "-include", sources / "machine.h", sources / "product.cpp", sources / "kernel.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    pointer, word, number = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
    loaded.product.argtypes = [pointer, pointer, word, ctypes.c_uint64, ctypes.c_uint64, word, number]
    loaded.kernel.argtypes = [number] * 6 + [word, pointer]
    loaded.shared_memory.restype = pointer
    return loaded


SWIZZLES = {128: 2, 64: 4, 32: 6}  # bytes of a row of the atom: what the descriptor says


def place(shared: Tensor, start: int, matrix: Tensor, mn_major: bool, span: int) -> tuple[int, int]:
    """Puts a matrix (MN, 16) into shared memory in swizzled atoms of 8 rows; returns what a descriptor says of it."""
    mn, depth = matrix.shape
    i, k = torch.meshgrid(torch.arange(mn), torch.arange(depth), indexing="ij")
    if mn_major:  # atoms of `span` bytes along MN and 8 of K; those along K come first
        row, byte, atom = k % 8, i * 2 % span, i * 2 // span * 2 + k // 8
        leading, stride = 2 * 8 * span, 8 * span
    else:
        row, byte, atom = i % 8, k * 2, i // 8
        leading, stride = 0, 8 * span
    chunk = byte // 16 ^ row // (128 // span) % (span // 16)  # rows of 128 bytes of the memory, not of the atom
    where = start + atom * 8 * span + row * span + chunk * 16 + byte % 16
    shared.view(torch.int16)[where // 2] = matrix.view(torch.int16)
    return leading, stride


def descriptor(start: int, leading: int, stride: int, span: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[span] << 61


@dataclass(frozen=True)
class Form:
    """Form of a product of 16 of K."""

    m: int = 128
    n: int = 128
    pair: bool = False
    dtype: torch.dtype = torch.bfloat16
    a_mn: bool = False
    b_mn: bool = False
    span: int = 128  # bytes of a row of the swizzle's atoms
    in_tensor: bool = False  # A is in tensor memory

    @property
    def ctas(self) -> int:
        return 2 if self.pair else 1

    @property
    def rows(self) -> int:
        return self.m // self.ctas

    @property
    def instruction(self) -> int:
        kind = int(self.dtype is torch.bfloat16)
        types = 1 << 4 | kind << 7 | kind << 10
        return types | self.a_mn << 15 | self.b_mn << 16 | self.n // 8 << 17 | self.m // 16 << 24

    def elements(self, tensors: Tensor, cta: int) -> list[tuple[Tensor, slice]]:
        """A CTA's part of the result in tensor memory, as views (columns, rows), and the columns that they are."""
        memory = tensors[cta, D:]
        if self.pair and self.m == 128:  # two halves of the columns, one below the other
            half = self.n // 2
            return [(memory[:half, :64], slice(half)), (memory[:half, 64:], slice(half, self.n))]
        if self.m == 64:  # in the first half of each warp's lanes
            return [(memory[: self.n].view(-1, 4, 32)[:, :, :16], slice(self.n))]
        return [(memory[: self.n, : self.rows], slice(self.n))]


D, A = 64, 448  # columns of tensor memory
FORMS = {
    "K-major": Form(),
    "MN-major": Form(a_mn=True, b_mn=True),
    "A MN-major": Form(a_mn=True, n=256),
    "float16": Form(dtype=torch.float16, b_mn=True),
    "64 rows": Form(m=64, n=72),
    "narrow atoms": Form(span=64, b_mn=True),
    "narrowest atoms": Form(span=32),
    "A in tensor memory": Form(in_tensor=True, b_mn=True, n=64),
    "pair": Form(m=256, pair=True),
    "pair, MN-major": Form(m=256, pair=True, a_mn=True, b_mn=True, n=256),
    "pair, A in tensor memory": Form(m=256, pair=True, in_tensor=True),
    "pair of 64 rows": Form(m=128, pair=True, n=64),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_products(host: ctypes.CDLL, form: Form) -> None:
    a, b = torch.randn(form.m, 16, dtype=form.dtype), torch.randn(form.n, 16, dtype=form.dtype)
    c = torch.randn(form.ctas, form.rows, form.n)
    shared = torch.zeros(2, 262144, dtype=torch.uint8)
    tensors = torch.full((2, 512, 128), float("nan"))
    a_word = A
    for cta in range(form.ctas):
        own_a, own_b = (x.view(form.ctas, -1, 16)[cta].contiguous() for x in (a, b))
        if form.in_tensor:
            tensors.view(torch.int32)[cta, A : A + 8, : form.rows] = own_a.view(torch.int32).T
        else:
            a_word = descriptor(2048, *place(shared[cta], 2048, own_a, form.a_mn, form.span), form.span)
        b_word = descriptor(65536, *place(shared[cta], 65536, own_b, form.b_mn, form.span), form.span)
        for view, columns in form.elements(tensors, cta):
            view.copy_(c[cta, :, columns].T.reshape(view.shape))
    before = tensors.clone()
    product = (a.double() @ b.double().T).view(form.ctas, form.rows, form.n)
    for accumulate in (True, False):
        tensors.copy_(before)
        flags = form.in_tensor + 2 * form.pair + 4 * accumulate
        words = D, a_word, b_word, form.instruction, flags
        assert host.product(shared.data_ptr(), tensors.data_ptr(), *words) == 1
        expected = product + accumulate * c
        for cta in range(form.ctas):
            for view, columns in form.elements(tensors, cta):
                found = view.reshape(view.shape[0], -1).T.double()
                torch.testing.assert_close(found, expected[cta, :, columns], rtol=1e-5, atol=1e-5)
            for new, old in zip(form.elements(tensors, cta), form.elements(before, cta), strict=True):
                new[0].copy_(old[0])
        assert torch.equal(tensors.view(torch.int32), before.view(torch.int32))  # nothing else was written


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"instruction": 1 << 3}, 0),  # saturating
        ({"instruction": 1 << 30}, 0),
        ({"instruction": 3 << 7}, 0),  # another type
        ({"instruction": 7 << 24}, 0),  # 240 rows
        ({"instruction": 1 << 17}, 0),  # 136 columns
        ({"d": 400}, 0),  # too far to the right
        ({"d": 1 << 16}, 0),  # not from the first lane
        ({"b": 1 << 49}, 0),  # a base offset
        ({"b": 1 << 46}, 0),  # another version
        ({"b": 1 << 61}, 0),  # atoms of 32 bytes in rows of 128
        ({}, 2),  # 128 rows are 64 a CTA, but 160 columns no multiple of 32
        ({"instruction": 1 << 15}, 1),  # in tensor memory A is K-major
    ],
)
def test_forms_of_products_that_are_not_known(host: ctypes.CDLL, changes: dict[str, int], flags: int) -> None:
    memory = torch.zeros(2, 262144)
    word = descriptor(0, 0, 1024, 128)
    numbers = {"d": 0, "a": word, "b": word, "instruction": 1 << 4 | 1 << 7 | 1 << 10 | 16 << 17 | 8 << 24}
    pointer = memory.data_ptr()
    arguments = numbers if not flags & 1 else numbers | {"a": 256}
    assert host.product(pointer, pointer, *arguments.values(), flags) == 1
    arguments = {name: value ^ changes.get(name, 0) for name, value in arguments.items()}
    if flags == 2:
        arguments["instruction"] ^= (16 ^ 18) << 17
    assert host.product(pointer, pointer, *arguments.values(), flags) == 0


@pytest.mark.parametrize(
    ("form", "waiters", "lanes", "jitter_ns"),
    [
        (Form(n=64, m=128 * ctas, pair=ctas == 2), waiters, lanes, 200_000 * ((ctas + number) % 2))
        for ctas in (1, 2)
        for number, (waiters, lanes) in enumerate([(1, 1), (4, 1), (2, 32)])
    ],
    ids=lambda given: {1: "one", 2: "two"}[given.ctas] if isinstance(given, Form) else str(given),
)
def test_products_are_executed_in_order_by_those_who_wait(
    host: ctypes.CDLL, form: Form, waiters: int, lanes: int, jitter_ns: int
) -> None:
    """Each step of a kernel is seen as a whole by all who wait for its commit; everything is freed at the end."""
    page = mailbox.mailbox()
    page.configure(jitter_ns=jitter_ns)
    a, b = (torch.randint(-2, 3, (rows, 16)).to(torch.bfloat16) for rows in (form.m, form.n))  # whose sums are exact
    expected = (a.float() @ b.float().T).contiguous()
    memory = (ctypes.c_uint8 * (2 * 262144)).from_address(host.shared_memory())
    shared = torch.frombuffer(memory, dtype=torch.uint8).view(2, 262144)
    for cta in range(form.ctas):
        for start, matrix in ((1024, a), (65536, b)):
            place(shared[cta], start, matrix.view(form.ctas, -1, 16)[cta].contiguous(), False, 128)
    steps, many = (16, 700) if lanes == 1 else (3, 20)
    for _ in range(3):
        assert host.kernel(form.ctas, steps, 3, waiters, lanes, 1, form.instruction, expected.data_ptr()) == 0
        assert host.in_use() == 0
    # More products than the queue has places: who issues them has to help.
    assert host.kernel(form.ctas, 1, many, waiters, lanes, 1, form.instruction, expected.data_ptr()) == 0
    assert page.take_faults() == []


def test_planted_bugs(capfd: pytest.CaptureFixture[str]) -> None:
    text = module("tcgen05.wait::st.sync.aligned;", "bar.sync 0;")
    assert hook.planted(text, (r"tcgen05\.wait::st[^;]*;\n", "")) == module("bar.sync 0;")
    assert "is replaced 1 times" in capfd.readouterr().err


def test_pytest_gets_the_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: sys.exit(0))
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit):
        command.main(["--jitter-us", "20", "--b300", "--plant", "a.*", "", "--", "pytest", "-q", "FILE"])
    _, _, plugin, *rest = sys.argv
    assert plugin == "lab.emulator.pytest_plugin"
    options = ["--sm100-jitter-us", "20.0", "--sm100-limit-s", "20.0", "--sm100-b300", "--sm100-plant", "a.*", ""]
    assert rest == [*options, "-q", "FILE"]


def test_a_product_without_a_commit_is_reported(host: ctypes.CDLL) -> None:
    page = mailbox.mailbox()
    page.configure()
    assert host.kernel(1, 1, 2, 0, 1, 0, Form().instruction, None) == 0
    (fault,) = page.take_faults()
    assert str(fault) == (
        "PTX line 5, CTA (0, 0, 0), thread 0: tcgen05.dealloc, and the last tcgen05.mma of thread 0 has no "
        "tcgen05.commit behind it"
    )


def planted_by_the_page() -> list[list[str]]:
    """Patterns of the table of planted bugs, what takes the place of their matches, and what is reported."""
    page = (ROOT.parents[1] / "docs" / "sm100-on-hopper.md").read_text()
    return [list(row) for row in re.findall(r"^\| `--plant '(.*)' '(.*)'` \| (.*) \|$", page, re.MULTILINE)]


KERNELS = {"one CTA": chosen(128, "right"), "pairs of CTAs": backward(128, keys=LONG)}


@pytest.mark.parametrize("config", tiered(KERNELS, "one CTA", values=True))
def test_blackwell_kernels(config: Any, tmp_path: Path) -> None:
    """They are known throughout, Hopper takes what is written, and the bugs of the page can be planted."""
    text = code_for(config).ptx
    translation = translate(text)
    assert len(translation.emulated) == 1
    assert "error" not in assembled(translation, tmp_path)
    bugs = planted_by_the_page()
    assert len(bugs) == 4
    for pattern, replacement, report in bugs:
        assert translate(hook.planted(text, (pattern, replacement))) != translation
        assert any(report in fault for fault in mailbox.FAULTS.values())


@pytest.mark.slow
def test_a_binary_takes_the_place_of_the_compiler_s(tmp_path: Path) -> None:
    cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    compiler = pytest.importorskip("cutlass.base_dsl.compiler")
    from flash_attn_cute.jit import code
    from flash_attn_cute.jit.compile import compile_kernel

    kernel = compile_kernel(chosen(128, "right"), cute.KeepPTX, compiler.DumpDir(str(tmp_path)))
    assembled(translate(kernel.artifacts.PTX), tmp_path)
    assert b"sm100_wait" not in code.export(kernel)
    hook.replace_binary(kernel, (tmp_path / "kernel.o").read_bytes())
    assert b"sm100_wait" in code.export(kernel)
