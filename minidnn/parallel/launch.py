"""Who am I? Rank, number of ranks and address, as Open MPI, MPICH, Slurm or torchrun tell a process they have started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minidnn.errors import UserError


@dataclass(frozen=True, slots=True)
class Place:
    """A process among those that were started together. ``local_*``: among those of one host. ``address``: host and port
    where torchrun lets ranks meet; MPI needs none. ``local_rank`` None: the launcher does not say."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int = 1
    launcher: str = ""
    address: tuple[str, int] | None = None

    @property
    def has_mpi(self) -> bool:
        """Whether the launcher lets processes find each other through MPI."""
        return self.launcher not in ("", "torchrun")


# launcher -> (rank, size, local rank, local size); the first that is there decides. Slurm comes last, because its
# variables are there, too, where mpiexec is started inside an allocation. The size is that of the step, which srun alone
# sets: a script of sbatch has SLURM_NTASKS and SLURM_PROCID=0, and is one process all the same.
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}  # fmt: skip


def place(environ: Mapping[str, str]) -> Place:
    """Read the environment; one rank of one where no launcher has left anything.

    Raises UserError where variables are no numbers, out of range, or where launchers contradict each other.
    """
    found = []
    for launcher, names in _VARIABLES.items():
        rank, size = (environ.get(name) for name in names[:2])
        if rank is None or size is None:
            if launcher == "torchrun" and (rank is None) != (size is None):
                has, lacks = names[:2] if size is None else (names[1], names[0])
                raise UserError(
                    f"the environment has {has}={environ[has]} but no {lacks}: start with torchrun, or unset it"
                )
            continue
        local_rank, local_size = (environ.get(name) for name in names[2:])
        found.append(_place(launcher, names, (rank, size, local_rank, local_size), environ))
    for other in found[1:]:
        first = found[0]
        if other.launcher != "Slurm" and (other.rank, other.size) != (first.rank, first.size):
            raise UserError(
                f"{first.launcher} says rank {first.rank} of {first.size}, {other.launcher} says rank {other.rank} of "
                f"{other.size}: start with one launcher"
            )
    return found[0] if found else Place()


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this process is rank 0, as far as an environment can tell that may contradict itself.

    Variables of MPI come before those of torchrun, which are the ones that are left over in a shell.
    """
    names = [_VARIABLES[launcher][:2] for launcher in ("Open MPI", "MPICH", "torchrun", "Slurm")]
    found = [environ[rank] for rank, size in names if rank in environ and size in environ]
    return not found or found[0] == "0"


def _place(launcher: str, names: tuple[str, ...], values: tuple[str | None, ...], environ: Mapping[str, str]) -> Place:
    numbers = [_number(name, value) for name, value in zip(names, values, strict=True)]
    rank, size = numbers[0] or 0, numbers[1] or 0
    if not 0 <= rank < size:
        raise UserError(f"{names[0]}={rank} and {names[1]}={size}: ranks are 0 to one less than their number")
    address = None
    if launcher == "torchrun":
        port = _number("MASTER_PORT", environ.get("MASTER_PORT"))
        if "MASTER_ADDR" not in environ or port is None:
            raise UserError("torchrun left no MASTER_ADDR and MASTER_PORT in the environment: start with torchrun")
        address = environ["MASTER_ADDR"], port
    return Place(rank, size, numbers[2], numbers[3] or 1, launcher, address)


def _number(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return int(value.partition("(")[0])  # Slurm writes 4(x2) for two hosts of four tasks
    except ValueError:
        raise UserError(
            f"{name}={value!r} in the environment is no number; start with mpiexec, srun or torchrun"
        ) from None
