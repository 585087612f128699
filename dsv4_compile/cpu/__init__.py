"""Forms of ops for CPUs: what their references compute, with few passes over memory and few calls of torch.

They may look at values on the host, which a reference may not: a CPU has nothing to wait for.
"""
