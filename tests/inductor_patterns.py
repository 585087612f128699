"""Not a test: registers Inductor's patterns when it is imported, so that forks of a warm interpreter need not.

The first compilation of a process does it otherwise, which takes seconds.
"""

from __future__ import annotations

import torch
from torch._inductor.fx_passes import joint_graph, post_grad, pre_grad

pre_grad.lazy_init()
joint_graph.lazy_init(torch.device("cpu"))
post_grad.lazy_init()
