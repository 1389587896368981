"""`dreamc export dcp` read by PyTorch, for `tests/cli/ranks.rs`.

    python tests/hf/distributed.py FOLDER WEIGHTS OPTIMIZER STEP    the folder's state dict is that of two files of safetensors, whole,
                                                                    and as two ranks read it, each the upper or lower half of every tensor
"""

import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

warnings.filterwarnings("ignore")


def empty(expected):
    return {part: {name: torch.full_like(t, 7) for name, t in tensors.items()} for part, tensors in expected.items()}


def half(rank, folder, weights):
    """A rank of two, with half of every tensor."""
    warnings.filterwarnings("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    expected = load_file(weights)
    mesh = init_device_mesh("cpu", (2,))
    split = lambda t: distribute_tensor(t, mesh, [Shard(0)])
    state = {"model": {name: split(torch.full_like(t, 7)) for name, t in expected.items()}}
    dcp.load(state, checkpoint_id=folder)
    for name, t in expected.items():
        assert torch.equal(state["model"][name].to_local(), split(t).to_local()), (rank, name)
    torch.distributed.destroy_process_group()


def main(folder, weights, optimizer, step):
    expected = {"model": load_file(weights), "optimizer": load_file(optimizer)}
    state = empty(expected) | {"step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for part, tensors in expected.items():
        for name, t in tensors.items():
            assert torch.equal(state[part][name], t), (part, name)
    assert state["step"].item() == int(step), state["step"]

    found = FileSystemReader(folder).read_metadata()
    names = {f"{part}.{name}" for part, tensors in expected.items() for name in tensors} | {"step"}
    assert set(found.state_dict_metadata) == names, names ^ set(found.state_dict_metadata)

    # The whole state without a model: its nested names are in the folder.
    dcp_to_torch_save(folder, folder + ".pt")
    whole = torch.load(folder + ".pt", weights_only=True)
    assert all(torch.equal(whole["model"][name], t) for name, t in expected["model"].items())

    processes.spawn(half, args=(folder, weights), nprocs=2)
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
