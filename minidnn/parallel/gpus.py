"""One process, one GPU: which rank takes which, and how arrays travel from there."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from minidnn.device.cuda_libraries import device_count, import_cupy, parse_device
from minidnn.errors import UserError
from minidnn.parallel.agree import compare
from minidnn.parallel.communicator import Bootstrapped, Communicator
from minidnn.parallel.inprocess import InProcess
from minidnn.parallel.launch import Place
from minidnn.parallel.nccl import Nccl
from minidnn.parallel.staged import Staged
from minidnn.schedule.instruction import COMM


class Seat(NamedTuple):
    """Where a rank runs. ``gpus``: bus addresses of the GPUs it sees; ``why``: there are none."""

    host: str
    local_rank: int | None
    gpus: tuple[str, ...]
    why: str = ""


def own_device(communicator: Communicator, place: Place, device: str) -> str:
    """What this rank computes on: with ``auto``, ``cuda`` or ``cuda:0`` each rank of a host takes a GPU of its own.

    ``auto`` stays where no rank has a GPU. Collective. Raises UserError on every rank, with one sentence, where ranks and
    GPUs do not go together.
    """
    if communicator.size == 1:
        return device
    compare(communicator, {"option --device": device})
    if device == "emulated":
        return device
    if device != "auto" and parse_device(device):
        raise UserError(f"--device {device} on {communicator.size} ranks: each takes its own GPU; write --device cuda")
    seats = [Seat(*seat) for seat in communicator.exchange((socket.gethostname(), place.local_rank, *_gpus()))]
    if device == "auto" and not any(seat.gpus for seat in seats):
        return device
    return f"cuda:{assign(seats)[communicator.rank]}"


def _gpus() -> tuple[tuple[str, ...], str]:
    try:
        runtime = import_cupy().cuda.runtime
        return tuple(str(runtime.deviceGetPCIBusId(i)) for i in range(device_count(runtime))), ""
    except UserError as error:
        return (), str(error)


def assign(seats: Sequence[Seat]) -> list[int]:
    """The number of each rank's GPU among those it sees: that of its place on its host, or 0 where it sees one alone."""
    found: list[int] = []
    taken: dict[tuple[str, str], int] = {}
    for rank, seat in enumerate(seats):
        place = sum(other.host == seat.host for other in seats[:rank])
        if not seat.gpus:
            raise UserError(f"rank {rank} on {seat.host} has no GPU that it can use: {seat.why or 'it sees none'}")
        if seat.local_rank not in (None, place):
            raise UserError(
                f"the launcher calls rank {rank} number {seat.local_rank} on {seat.host}, where it is number {place}: start all "
                "ranks with one launcher, hosts in order"
            )
        index = place if len(seat.gpus) > 1 else 0
        if index >= len(seat.gpus) or (seat.host, seat.gpus[index]) in taken:
            ranks = sum(other.host == seat.host for other in seats)
            gpus = len({gpu for other in seats if other.host == seat.host for gpu in other.gpus})
            raise UserError(
                f"{ranks} ranks run on {seat.host}, which has {gpus} GPU{'s' * (gpus != 1)} for them: start {gpus}, or use "
                "--device emulated"
            )
        taken[seat.host, seat.gpus[index]] = rank
        found.append(index)
    return found


def on_device(communicator: Communicator, device: Any) -> Communicator:
    """The communicator for arrays of a device: NCCL on a GPU; through the host for threads, and where it is that already.

    Collective on a GPU.
    """
    if not hasattr(device, "stream"):
        return communicator
    bootstrap = communicator.bootstrap if isinstance(communicator, Bootstrapped) else communicator
    if isinstance(communicator, Staged | InProcess):
        return Staged(bootstrap, device)
    return Nccl(bootstrap, device.stream(COMM))
