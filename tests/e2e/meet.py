"""One rank of a rendezvous as vLLM's CPU ranks have it: a TCP store at the head, Gloo over what resolve.py chose.

Usage: meet.py RANK RANKS HEAD PORT. Prints the sum of all ranks and the address and interface of each.
"""

import os
import sys

import torch
import torch.distributed as dist

rank, ranks, head, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://{head}:{port}", rank=rank, world_size=ranks)
total = torch.tensor(rank)
dist.all_reduce(total)
found: list[str] = [""] * ranks
dist.all_gather_object(found, f"{os.environ['VLLM_HOST_IP']} {os.environ['GLOO_SOCKET_IFNAME']}")
print(int(total), "; ".join(found))
dist.destroy_process_group()
