"""One rank of PyTorch's DistributedDataParallel, which measures points for ``ring.py``: NCCL on GPUs, Gloo elsewhere.

PyTorch gets what it does best with: channels last, TF32 or automatic mixed precision, gradients as views of their buckets; on
a GPU ``cudnn.benchmark`` and a fused optimizer. Its batch is on the device already; ours is copied there in every step, from
pinned memory. Both learn at the rate of ``ring_worker.py``, which changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from ring_points import Point, build
from ring_worker import OPTIMIZER, seconds_of
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from minidnn.parallel.launch import place
from rivals import AMP, Rival


def train(point: Point, device: torch.device, settings: dict[str, Any]) -> dict[str, Any]:
    """Time training steps."""
    graph, precision, on_gpu = build(point.net, point.local), settings["precision"], device.type == "cuda"
    torch.manual_seed(0)
    model: Any = Rival(graph)
    model = model.to(device).train().to(memory_format=torch.channels_last)
    if point.ranks > 1:
        ids = [device.index] if on_gpu else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    batch, h, w, c = graph.inputs[0].shape
    x = torch.rand(batch, c, h, w, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(0, graph.logits.shape[-1], (batch,), device=device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=OPTIMIZER.lr, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=on_gpu or None
    )
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    loss = torch.zeros(())

    def work() -> None:
        nonlocal loss
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, AMP.get(precision, torch.bfloat16), enabled=precision in AMP):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def everybody(value: Any) -> list[Any]:
        if on_gpu:
            torch.cuda.synchronize()
        values = [None] * point.ranks
        distributed.all_gather_object(values, value)
        return values

    for _ in range(5 if on_gpu else 1):
        work()
    return {"step_seconds": seconds_of(work, everybody, settings), "loss": float(loss)}


def main() -> None:
    """Measure what the file of the first argument asks for; rank 0 writes a line before and after every point."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    here, on_gpu = place(os.environ), settings["device"] != "emulated"
    device = torch.device("cuda", here.local_rank or 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings["precision"] != "fp32"
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    distributed.init_process_group("nccl" if on_gpu else "gloo", rank=here.rank, world_size=here.size)

    def say(point: Point, **more: Any) -> None:
        if here.rank == 0:
            with Path(settings["out"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": point.key, **more}) + "\n")

    for point in (Point(*fields) for fields in settings["points"]):
        late = [time.time() >= settings["deadline"]]
        distributed.broadcast_object_list(late)  # by the clock of rank 0, for all
        if late[0]:
            break
        say(point)
        say(point, result=train(point, device, settings))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
