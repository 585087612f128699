"""Not a test: prepares Inductor when it is imported, so that forks of a warm interpreter need not.

The first compilation of a process otherwise registers patterns and hashes all files of torch and Triton: seconds.
"""

from __future__ import annotations

import torch
from torch._inductor.codecache import torch_key
from torch._inductor.fx_passes import joint_graph, post_grad, pre_grad
from torch._inductor.runtime.triton_compat import triton_key

pre_grad.lazy_init()
joint_graph.lazy_init(torch.device("cpu"))
post_grad.lazy_init()
torch_key()
triton_key()
