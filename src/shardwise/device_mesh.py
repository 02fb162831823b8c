"""Where torch keeps the mesh; it is torch's own."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
