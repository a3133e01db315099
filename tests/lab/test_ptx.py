"""PTX as a tree: what ``lab.ptx.tree`` makes of a text, and what it refuses."""

import pytest

from lab.ptx import tree

HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"
KERNEL = """
.extern .shared .align 1024 .b8 memory[];
.global .align 4 .u32 table[3] = {1, 2, 3};
.func (.param .b32 r) helper(.param .b32 a);
.visible .entry kernel(
	.param .u64 kernel_param_0,
	.param .align 64 .b8 kernel_param_1[128]
)
.reqntid 512, 1, 1
.minnctapersm 1
{
	.reg .pred 	%p<4>;
	.reg .b32 	%r<10>;
	.reg .b64 	%rd<2>;
	mov.b32 	%r1, memory; // comment; with a semicolon
	@!%p1 bra 	$L__BB0_2;
	// begin inline asm
	{
	.reg .pred P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1+8], %r2, 10000000;
	@P1 bra.uni DONE;
	bra.uni LAB_WAIT;
	DONE:
	}
	// end inline asm
	{ .reg .pred P1; DONE: elect.sync _|P1, -1; @P1 bra DONE; }
$L__BB0_2:
	elect.sync 	%r3|%p2, -1;
	tcgen05.wait::ld.sync.aligned;
	st.shared.v2.b32 	[%r1+-4], {%r4, %r5};
	fma.rn.f32 	%r6, %r7, 0f3F800000, %r8;
	call.uni (retval0), helper, (param0);
	selp.b32 	%r9, -1, 0x1F, !%p3;
	ret;
}
"""


def parsed() -> tree.Function:
    (function,) = tree.parse(HEAD + KERNEL + "\x00").functions
    return function


def find(opcode: str) -> tree.Instruction:
    (found,) = (x for x in parsed().instructions if x.opcode == opcode)
    return found


def test_a_function() -> None:
    function = parsed()
    assert (function.name, function.is_entry) == ("kernel", True)
    assert function.directives == {".reqntid": (512, 1, 1), ".minnctapersm": (1,)}
    assert function.instructions[0].opcode == "mov.b32"
    text = HEAD + KERNEL
    assert [text[x.start : x.end] for x in function.instructions[:2]] == [
        "mov.b32 \t%r1, memory;",
        "@!%p1 bra \t$L__BB0_2;",
    ]
    assert text.splitlines()[function.instructions[0].line - 1].strip().startswith("mov.b32")


@pytest.mark.parametrize(
    ("head", "registers"),
    [
        (".reqntid 512, 1, 1\n.minnctapersm 1", 128),
        (".reqntid 384\n", 168),
        (".maxntid 128, 1, 1 .minnctapersm 3", 168),
        (".reqntid 512 .minnctapersm 1 .maxnreg 96", 96),
    ],
)
def test_registers_at_launch(head: str, registers: int) -> None:
    (function,) = tree.parse(f"{HEAD}.entry kernel()\n{head}\n{{ ret; }}").functions
    assert function.registers == registers


def test_operands() -> None:
    wait = find("mbarrier.try_wait.parity.shared::cta.b64")
    assert [x.marks for x in wait.operands] == ["", "[", "", ""]
    assert wait.operands[1].names == ("%r1",)
    assert wait.operands[3].number == 10_000_000
    assert find("st.shared.v2.b32").operands[0].parts[0].parts[1].number == -4
    assert find("st.shared.v2.b32").operands[1].names == ("%r4", "%r5")
    assert [x.number for x in find("selp.b32").operands] == [None, -1, 31, None]
    assert find("selp.b32").operands[3].marks == "!"
    assert find("fma.rn.f32").operands[2].number is None
    assert [x.marks for x in find("call.uni").operands] == ["(", "", "("]
    assert find("tcgen05.wait::ld.sync.aligned").operands == ()
    branch = parsed().instructions[1]
    assert (branch.guard, branch.negated) == ("%p1", True)


def test_words_of_an_opcode() -> None:
    wait = find("mbarrier.try_wait.parity.shared::cta.b64")
    assert wait.is_a("mbarrier.try_wait", "ld")
    assert not wait.is_a("mbarrier.try")
    assert "shared::cta" in wait.parts


def test_names_mean_what_their_scope_says() -> None:
    function = parsed()
    first, second = (x for x in function.instructions if "P1" in [name for y in x.operands for name in y.names])
    assert first.register("P1") != second.register("P1")
    assert first.register("%r1") == function.instructions[0].register("%r1")


def test_flow() -> None:
    function = parsed()
    number = {x.opcode: i for i, x in enumerate(function.instructions)}
    end = len(function.instructions)
    wait = number["mbarrier.try_wait.parity.shared::cta.b64"]
    after = [i for i, x in enumerate(function.instructions) if x.is_a("elect")]
    successors = function.successors
    assert successors[1] == (after[1], 2)
    assert successors[wait + 1] == (after[0], wait + 2)  # the nearest DONE, not that of the next scope
    assert successors[wait + 2] == (wait,)
    assert successors[after[0] + 1] == (after[0], after[1])
    assert successors[end - 1] == (end,)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bra NOWHERE;", "no label NOWHERE"),
        ("brx.idx %r1, table;", "brx.idx is not known"),
        ("mov.b32 %r1, ;;", "expected an operand"),
        ("mov.b32 %r1, \u00e9;", "line 5: expected PTX"),
        (".loc 1 2 3;", ".loc is not known"),
    ],
)
def test_what_is_refused(body: str, message: str) -> None:
    text = f"{HEAD}.entry kernel()\n{{ {body} }}"
    with pytest.raises(tree.PtxError, match=message):
        _ = tree.parse(text).functions[0].successors


def test_a_text_that_ends_early() -> None:
    with pytest.raises(tree.PtxError, match="got the end"):
        tree.parse(HEAD + KERNEL[:-4])
    with pytest.raises(tree.PtxError, match=r"expected \.target"):
        tree.parse("")
