"""numpy arrays, torch tensors and Arrow data between nodes: beside the pickle, equal, aligned and writable."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy
import pyarrow
import pytest
import torch
from runtime_util import cluster, local_system, run

import pulsing as pul
from pulsing.core._pickle import dumps, loads

N = 100_000


def out_of_band(obj: Any, size: int) -> Any:
    """`obj` as it arrives; its `size` bytes of data were no part of the pickle."""
    head, buffers = dumps(obj)
    assert len(head) < 3000
    assert sum(memoryview(buffer).nbytes for buffer in buffers) < size + 1000
    return loads(head, [bytearray(buffer) for buffer in buffers])


def grid() -> Any:
    return numpy.arange(N, dtype=float).reshape(100, N // 100)


ARRAYS = {
    "contiguous": grid,
    "transposed": lambda: grid().T,
    "every other": lambda: grid()[:, ::2],
    "backwards": lambda: grid()[::-1],
    "Fortran": lambda: numpy.asfortranarray(grid()),
    "three dimensions": lambda: grid().reshape(10, 10, -1).transpose(2, 0, 1),
    "big endian": lambda: grid().astype(">f4"),
    "bools": lambda: grid() > 3,
    "complex": lambda: grid().astype(complex),
    "texts": lambda: grid().astype("U6"),
    "times": lambda: numpy.arange(N).astype("M8[s]"),
    "records": lambda: numpy.zeros(N, "i4,f8"),
    "read-only": lambda: numpy.broadcast_to(numpy.ones(1), N),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_leave_the_pickle_and_arrive_writable(kind: str) -> None:
    array = ARRAYS[kind]()
    back = out_of_band(array, array.nbytes)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()
    assert back.flags.writeable
    assert back.flags.aligned


@pytest.mark.parametrize(
    "array", [numpy.zeros(3), numpy.array(4.0), numpy.zeros((0, 3)), numpy.array([1, "x", None], object)]
)
def test_small_and_strange_arrays_arrive_writable(array: Any) -> None:
    array.setflags(write=False)
    back = loads(*dumps(array))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()
    if array.dtype != object:
        assert back.flags.writeable


def ramp() -> Any:
    return torch.arange(N, dtype=torch.float32)


TENSORS = {
    "float32": ramp,
    "bfloat16": lambda: ramp().bfloat16(),
    "float16": lambda: ramp().half(),
    "float8": lambda: ramp().to(torch.float8_e4m3fn),
    "int8": lambda: ramp().to(torch.int8),
    "bool": lambda: ramp() > 3,
    "complex": lambda: torch.complex(ramp(), ramp()),
    "conjugate": lambda: torch.complex(ramp(), ramp()).conj(),
    "transposed": lambda: ramp().reshape(100, -1).T,
    "every third": lambda: ramp()[::3],
    "part of a storage": lambda: ramp()[10:5000],
    "expanded": lambda: torch.ones(1).expand(N),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_leave_the_pickle_and_arrive_writable(kind: str) -> None:
    tensor = TENSORS[kind]()
    # Only what the view shows travels, not the storage behind it.
    back = out_of_band(tensor, tensor.numel() * tensor.element_size())
    assert (back.dtype, back.shape, back.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))
    back.zero_()


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.empty(0, 3), torch.ones(2, 2), torch.eye(50).to_sparse()])
def test_small_and_strange_tensors_arrive(tensor: Any) -> None:
    back = loads(*dumps(tensor))
    assert (back.shape, back.layout) == (tensor.shape, tensor.layout)
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_gradients_are_asked_for_as_before_and_modules_arrive_whole() -> None:
    leaf = ramp().requires_grad_()
    for tensor in (leaf, leaf * 2):
        back = out_of_band(tensor, 4 * N)
        assert back.requires_grad
        assert back.is_leaf
        assert torch.equal(back, tensor)
    linear = torch.nn.Linear(300, 300)
    back = out_of_band(linear, 4 * (300 * 300 + 300))
    assert isinstance(back.weight, torch.nn.Parameter)
    assert torch.equal(back.weight, linear.weight)


def test_a_device_that_is_not_here_is_the_cpu() -> None:
    from pulsing.core._arrays import tensor_on

    there = f"cuda:{torch.cuda.device_count()}"
    tensor = tensor_on(bytearray(8), "float32", (2,), False, there)
    assert tensor.device.type == "cpu"


def test_arrow_data_leaves_the_pickle() -> None:
    table = pyarrow.table({"n": numpy.arange(N), "text": [str(n) for n in range(N)]})
    size = table.nbytes
    assert out_of_band(table, size).equals(table)
    batch = table.to_batches()[0]
    assert out_of_band(batch, size).equals(batch)
    assert out_of_band(pyarrow.py_buffer(bytes(N)), N).equals(pyarrow.py_buffer(bytes(N)))


@pul.remote
class Echo:
    def same(self, value: Any) -> Any:
        return value

    def zeroed(self, array: Any) -> Any:
        array[:] = 0
        return array

    async def parts(self, array: Any) -> Any:
        for one in array:
            yield one


def test_across_nodes_arrays_are_aligned_exclusive_and_writable() -> None:
    async def main() -> None:
        async with cluster(2) as systems:
            await Echo.spawn(system=systems[0], name="echo")
            echo = await Echo.resolve("echo", system=systems[1], timeout=5)
            array, tensor = numpy.ones(N), torch.ones(N)
            for back in await echo.same([array, array[::-1], array.reshape(100, -1).T]):
                assert back.ctypes.data % 64 == 0
                back[:] = 2
            for back in await echo.same([tensor, tensor.bfloat16()]):
                assert back.data_ptr() % 64 == 0
                back.zero_()
            assert (await echo.zeroed(array) == 0).all()
            assert (await echo.zeroed(tensor) == 0).all()
            assert (array == 1).all()
            assert (tensor == 1).all()
            assert [part.sum() async for part in echo.parts(array.reshape(10, -1))] == [N / 10] * 10
            assert (await echo.same(pyarrow.table({"n": array})))["n"].to_numpy().sum() == N

    run(main())


def test_r15_within_a_process_arrays_pass_by_reference() -> None:
    async def main() -> None:
        async with local_system() as system:
            echo = await Echo.spawn(system=system)
            for value in (numpy.ones(N), torch.ones(N), pyarrow.table({"n": [1]})):
                assert await echo.same(value) is value

    run(main())


def test_sending_loads_no_library() -> None:
    code = (
        "import sys; from pulsing.core._pickle import dumps, loads; loads(*dumps([bytes(100_000), memoryview(b'x')])); "
    )
    code += "assert not {'numpy', 'torch', 'pyarrow', 'cloudpickle'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
