"""The host's side of a pass, run without a GPU: tensors in global memory, and the launching code as it was compiled.

The launching code is in the object file that users' processes load (``flash_attn_cute.jit.code``). It computes grids,
tensor maps and parameters, and calls CUDA. Here CUDA's functions are in Python, and write down what is launched. They
are put into the object file's empty section ``.text``, as a jump each, under the names that the file does not define.
"""

import ctypes
import itertools
import platform
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_attn_cute.kernels.sm100.config import SHARED_MEMORY
from lab.interpreter.program import Program
from lab.interpreter.state import FaultError, Launch, address_of

# Numbers of CUDA's enumerations.
_SHARED_A_BLOCK, _STATIC_SHARED = 97, 1  # attributes of a device, and of a kernel
_MOST_SHARED, _ANY_CLUSTER = 8, 14  # attributes of a kernel that are set
_COOPERATIVE, _CLUSTER, _OVERLAPPING = 2, 4, 6  # attributes of a launch
_ON_CUDA = 2  # of DLPack

_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")  # of ELF's tables
_SYMBOLS = 2  # the type of a section
_FILL = 0xFF  # of memory that is not written: bytes of NaN
# By processors: code that jumps to an address, which follows the first part, and code that returns 0.
_CODE = {
    "x86_64": (b"\x48\xb8", b"\xff\xe0", b"\x31\xc0\xc3"),
    "aarch64": (b"\x50\x00\x00\x58\x00\x02\x1f\xd6", b"", b"\x00\x00\x80\x52\xc0\x03\x5f\xd6"),
}


class Memory:
    """Global memory, filled with NaN, and tensors in it, by names."""

    def __init__(self, given: dict[str, Tensor]):
        """The last one ends with memory, so that nothing is read behind it."""
        self.given, self.places, size = given, dict[str, int](), 0
        for name, x in given.items():
            self.places[name] = size // 256 * 256 + 512 + x.data_ptr() % 16  # as aligned as it is
            size = self.places[name] + num_bytes(x)
        self.bytes: Any = np.full(-(-size // 16) * 16, _FILL, np.uint8)
        self.tensors = [slice(place, place + num_bytes(given[name])) for name, place in self.places.items()]
        for x, place in zip(given.values(), self.tensors, strict=True):
            self.bytes[place] = spread(x).view(torch.uint8).numpy()

    def read(self) -> None:
        """Puts into tensors what is in memory, where that is something else.

        Raises:
            FaultError: memory between tensors is no longer as it was.
        """
        between = self.bytes != _FILL
        for place in self.tensors:
            between[place] = False
        if between.any():
            raise FaultError(f"{np.count_nonzero(between)} bytes are written that belong to no tensor")
        for x, place in zip(self.given.values(), self.tensors, strict=True):
            found = torch.from_numpy(self.bytes[place].copy())
            if not torch.equal(found, spread(x).view(torch.uint8)):
                spread(x).copy_(found.view(x.dtype))


def num_bytes(x: Tensor) -> int:
    """Bytes of the memory behind a tensor, as far as its strides reach."""
    return spread(x).numel() * x.element_size()


def spread(x: Tensor) -> Tensor:
    """The memory behind a tensor, as far as its strides reach."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((reach if x.numel() else 0,), (1,))


class Host:
    """The launching code of a configuration, and its kernels."""

    def __init__(self, ptx: str, launching_code: bytes):
        """PTX of the kernels, and the object file of what launches them."""
        from cutlass.cute.export import _BinaryExecutionEngine
        from cutlass.cute.runtime import find_runtime_libraries
        from cutlass.cutlass_dsl.tvm_ffi_provider import tvm_ffi

        self._text, self._from_dlpack = ptx, tvm_ffi.from_dlpack
        self._programs: dict[str, Program] = {}
        self._kernels: list[str] = []  # by their handles
        self._most_shared: dict[int, int] = {}
        self._launches: list[Launch] = []
        self._error: Exception | None = None
        functions = {
            "cuda_dialect_init_library_once": self._load_library,
            "_cudaLibraryLoadData": lambda library, *_: _write("<Q", library, 1),
            "_cudaLibraryGetKernel": self._get_kernel,
            "_cudaDeviceGetAttribute": self._get_device_attribute,
            "_cuKernelGetAttribute": self._get_kernel_attribute,
            "_cudaKernelSetAttributeForDevice": self._set_kernel_attribute,
            "_cudaLaunchKernelEx": self._launch,
        }
        self._functions = {name: self._in_c(function) for name, function in functions.items()}
        stubs = {name: _jump_to(function) for name, function in self._functions.items()}
        # Called when the code is unloaded, which may be after Python has ended.
        stubs["cuda_dialect_unload_library_once"] = _CODE[platform.machine()][2]
        libraries = find_runtime_libraries(enable_tvm_ffi=True)
        for library in libraries:
            ctypes.CDLL(library)
        engine = _BinaryExecutionEngine(_linked(launching_code, stubs), libraries, True)
        found = engine.lookup("__tvm_ffi_kernel")
        self._function = tvm_ffi.Function.__from_extern_c__(found, keep_alive_object=engine)

    def program(self, name: str) -> Program:
        """A kernel, by its whole name."""
        if name not in self._programs:
            self._programs[name] = Program(self._text, name)
        return self._programs[name]

    def launches(self, arguments: Any, places: Mapping[str, int]) -> list[Launch]:
        """The kernels that a call launches, in order.

        Args:
            arguments: of the pass.
            places: where in global memory tensors among them are, by their names.
        """
        self._launches, self._error = [], None
        try:
            self._function(self._on_gpu(arguments, places))
        except Exception:
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error
        return self._launches

    def _on_gpu(self, arguments: Any, places: Mapping[str, int]) -> Any:
        """The arguments, with tensors that claim to be on a GPU."""
        given = {}
        for name, x in arguments._asdict().items():
            if isinstance(x, Tensor):
                x = self._from_dlpack(_Claimed(x, address_of(places[name])))
            elif isinstance(x, tuple):
                x = self._on_gpu(x, places)
            given[name] = x
        return type(arguments)(**given)

    def _in_c(self, function: Callable[..., None]) -> Any:
        """A function that C calls, with six numbers at most; its error is kept, and makes it return 1."""

        def call(*given: int) -> int:
            try:
                function(*given)
            except Exception as error:
                self._error = self._error or error
                return 1
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 6)(call)

    def _load_library(self, library: int, load: int, prepare: int, *_: int) -> None:
        if not _read("<Q", library)[0]:
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(load)(library)
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(prepare)(library, 0)

    def _get_kernel(self, kernel: int, library: int, name: int, *_: int) -> None:
        self._kernels.append(ctypes.string_at(name).decode())
        _write("<Q", kernel, len(self._kernels))

    def _get_device_attribute(self, value: int, attribute: int, *_: int) -> None:
        _write("<i", value, {_SHARED_A_BLOCK: SHARED_MEMORY}[attribute])

    def _get_kernel_attribute(self, value: int, attribute: int, *_: int) -> None:
        _write("<i", value, {_STATIC_SHARED: 0}[attribute])

    def _set_kernel_attribute(self, kernel: int, attribute: int, value: int, *_: int) -> None:
        if attribute == _MOST_SHARED:
            self._most_shared[kernel] = value
        elif attribute != _ANY_CLUSTER:
            raise NotImplementedError(f"attribute {attribute} of a kernel")

    def _launch(self, config: int, kernel: int, params: int, *_: int) -> None:
        *sizes, shared, _, first, num = _read("<6I3QI", config)
        cluster = 1, 1, 1
        for i in range(num):
            attribute, *value = _read("<I4x3I", first + 72 * i)
            if attribute == _CLUSTER:
                cluster = tuple(value)
            elif attribute not in (_COOPERATIVE, _OVERLAPPING) or value[0]:
                raise NotImplementedError(f"attribute {attribute} of a launch: {value}")
        name = self._kernels[kernel - 1]
        pointers = itertools.count(params, 8)
        given = [ctypes.string_at(_read("<Q", next(pointers))[0], size) for size in self.program(name).param_sizes]
        if shared > self._most_shared[kernel]:
            raise FaultError(f"{shared} bytes of shared memory of {self._most_shared[kernel]}")
        launch = Launch(given, tuple(sizes[:3]), tuple(sizes[3:]), cluster, shared, name)
        self._launches.append(launch)


class _Claimed:
    """A tensor with another address, on a GPU, as DLPack hands it on."""

    def __init__(self, x: Tensor, address: int):
        self.capsule = x.detach().__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        _write("<Qi", get(self.capsule, b"dltensor"), address, _ON_CUDA)

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_CUDA, 0


def _read(form: str, address: int) -> tuple[Any, ...]:
    return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))


def _write(form: str, address: int, *values: int) -> None:
    ctypes.memmove(address, struct.pack(form, *values), struct.calcsize(form))


def _jump_to(function: Any) -> bytes:
    """Code that goes on with a function."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    ahead, behind, _ = _CODE[platform.machine()]
    return ahead + address.to_bytes(8, "little") + behind


def _linked(code: bytes, stubs: Mapping[str, bytes]) -> bytes:
    """An object file whose undefined symbols are stubs, where there are such."""
    made = bytearray(code) + bytes(-len(code) % 16)
    table, number, of_names = struct.unpack_from("<Q", code, 0x28) + struct.unpack_from("<HH", code, 0x3C)
    sections = [list(_SECTION.unpack_from(code, table + i * _SECTION.size)) for i in range(number)]

    def text_at(place: int) -> str:
        return code[place : code.index(b"\0", place)].decode()

    (empty,) = (i for i, section in enumerate(sections) if text_at(sections[of_names][4] + section[0]) == ".text")
    (symbols,) = (section for section in sections if section[1] == _SYMBOLS)
    assert sections[empty][5] == 0
    sections[empty][4] = start = len(made)
    names = sections[symbols[6]][4]
    for place in range(symbols[4], symbols[4] + symbols[5], _SYMBOL.size):
        name, _, other, section, _, _ = _SYMBOL.unpack_from(code, place)
        stub = stubs.get(text_at(names + name)) if section == 0 else None
        if stub is not None:
            _SYMBOL.pack_into(made, place, name, 0x12, other, empty, len(made) - start, len(stub))  # global, a function
            made += stub + bytes(-len(stub) % 16)
    sections[empty][5] = len(made) - start
    _SECTION.pack_into(made, table + empty * _SECTION.size, *sections[empty])
    return bytes(made)
