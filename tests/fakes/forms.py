"""Small programs that write through views, read stale views, or choose dtypes: each must compute what PyTorch does.

Each gets `x`, float32 [2, 6] of 0 to 11, and returns what is in `return`.
"""

WRITES = """
y = x.clone(); y.view(-1)[0:3] = 50; return y
y = x.clone(); y.view(3, 4)[1] = 50; return y
y = x.clone(); y.reshape(-1)[2] = 7; return y
y = x.clone(); y.flatten().clamp_(max=4); return y
y = x.clone(); y.t()[1] = 9; return y
y = x.clone(); y.T.add_(1); return y
y = x.clone(); y.mT[0].neg_(); return y
y = x.clone(); y.transpose(0, 1)[0].add_(3); return y
y = x.clone(); y.permute(1, 0)[2:4].mul_(2); return y
y = x.clone(); y.movedim(0, 1)[0].zero_(); return y
y = x.clone(); y.swapaxes(0, 1)[5].fill_(3); return y
y = x.clone(); y.narrow(1, 1, 2).zero_(); return y
y = x.clone(); a, b = y.chunk(2, -1); a.mul_(2); return y
y = x.clone(); a, b = y.chunk(2, -1); b.copy_(a); return y
y = x.clone(); a, b, c = y.split(2, 1); b.sub_(1); return y
y = x.clone(); a, b = y.split([2, 4], 1); b.sqrt_(); return y
y = x.clone(); a, b = torch.tensor_split(y, 2, 1); a.fill_(5); return y
y = x.clone(); a, b = torch.tensor_split(y, indices=(1,), dim=1); a.fill_(5); return y
y = x.clone(); a, b = y.tensor_split(sections=2, dim=0); a.fill_(5); return y
y = x.clone(); y.unbind(0)[1].zero_(); return y
y = x.clone(); y.unbind(1)[4].add_(1); return y
y = x.clone(); z = y[0]; z[1] = 90; return y
y = x.clone(); z = y[:, 1:5:2]; z += 1; return y
y = x.clone(); z = y[-1]; z.mul_(0.5); return y
y = x.clone(); z = y[..., 3]; z.add_(x[..., 0]); return y
y = x.clone(); z = y[None]; z.mul_(2); return y
y = x.clone(); z = y[0:1, 2:4].view(2); z[0] = 8; return y
y = x.clone(); y.unsqueeze(1).add_(1); return y
y = x[:1].clone(); y.squeeze(0)[3] = 1; return y
y = x.clone(); y.unflatten(1, (2, 3))[:, 1].zero_(); return y
y = x.clone(); y.diagonal().zero_(); return y
y = x.clone(); torch.diagonal(y, 1).add_(5); return y
y = x.clone(); y.view(2, 2, 3).diagonal(dim1=1, dim2=2).fill_(2); return y
y = x.clone(); y.detach().add_(2); return y
y = x.clone(); y.data.add_(2); return y
y = x.clone(); y.view_as(x)[0] = 3; return y
y = x.clone(); y.as_strided((2,), (3,)).fill_(4); return y
y = x.clone(); y.unfold(1, 2, 2)[:, 1].zero_(); return y
y = x.clone(); torch.view_as_complex(y.view(2, 3, 2)).mul_(2); return y
y = torch.complex(x, x); torch.view_as_real(y)[..., 1].zero_(); return torch.view_as_real(y)
y = torch.complex(x, x); y.real.add_(1); return torch.view_as_real(y)
y = torch.complex(x, x); y.imag.mul_(3); return torch.view_as_real(y)
y = x.clone(); y.contiguous().add_(1); return y
y = x.clone(); y.float().add_(1); return y
y = x.clone(); y.to(torch.float32).add_(1); return y
y = x.clone(); y.t().contiguous().add_(1); return y
y = x.clone(); y.t().reshape(-1).add_(1); return y
y = x.clone(); y[0].reshape(2, 3)[1] = 0; return y
y = x.clone(); y.expand(2, 6).add_(1); return y
y = x.clone(); y[[0, 1]].zero_(); return y
y = x.clone(); y[:, 2].unsqueeze(-1).expand(2, 1).mul_(4); return y
y = x.clone(); [z.add_(n) for n, z in enumerate(y)]; return y
y = x.clone(); a, b = y; a.add_(b); return y
y = x.clone(); y.view(-1).index_copy_(0, torch.tensor([0, 2]), x[0, 4:]); return y
y = x.clone(); y[0].index_fill_(0, torch.tensor([0, 2]), 9.0); return y
y = x.clone(); y[1].masked_fill_(x[0] > 2, -1.0); return y
y = x.clone(); y[:, torch.arange(x.shape[1]) != 1].zero_(); return y
y = x.clone(); y[0].scatter_(0, torch.tensor([1, 3]), x[1, :2]); return y
y = x.clone(); y.t()[2:5].index_add_(0, torch.tensor([0, 1]), x.t()[:2]); return y
y = x.clone(); y[0].lerp_(y[1], 0.5); return y
y = x.clone(); y[:, :3].addcmul_(x[:, 3:], x[:, 3:]); return y
y = x.clone(); y.view(3, 4).clamp_(2, 5).mul_(2); return y
y = x.clone(); torch.add(x, 1, out=y); return y
y = x.clone(); z = y[0]; torch.mul(x[0], 2, out=z); return y
y = torch.empty(0, device=x.device); torch.sin(x.t(), out=y); return y * 2 + y.stride(0)
y = torch.empty(0, device=x.device); torch.add(x, 1, out=y); y[0] = 5; return y
y = torch.zeros(4, 6, device=x.device); torch.stack([x[0], x[1]], out=y[1:3]); return y
y = x.clone(); v = y[0]; torch.where(y > 2, y, -y, out=y); return v
y = x[:, 0].clone(); n = y.new_empty(0).long(); torch.max(x, 1, out=(y, n)); return y * n
y = torch.empty(0, device=x.device); z = torch.arange(3.0, device=x.device); torch.cat([z, z], out=y); return y + x
y = torch.empty(2, 1, 2, device=x.device); torch.bmm(x[:, None], x.t()[None].expand(2, 6, 2), out=y); return y
y = torch.empty(0, device=x.device); torch.matmul(x, x[0], out=y); return y
y = torch.zeros(4, 6, device=x.device); y[1:3] = x; return y
y = torch.zeros(4, 6, device=x.device); y[1:3].copy_(x); return y
y = torch.empty(2, 6, device=x.device); y[:, 0::2] = x[:, :3]; y[:, 1::2] = x[:, 3:]; return y
y = torch.zeros_like(x); a, b = y.chunk(2, -1); a.copy_(x[:, :3]); b.copy_(x[:, 3:]); return y
y = x.new_zeros(2, 6); y[0] = x[1]; y[1] = x[0]; return y
y = torch.zeros(6, 2, device=x.device).t(); y[0] = x[0]; return y
y = torch.arange(12.0, device=x.device).view(3, 4)[1:]; z = y.t(); y[0] = x[0, :4]; return z
y = x.clone(); z = y.to(torch.float32, copy=True); z.add_(1); return y
y = x.clone(); z = torch.nn.functional.dropout(y, 0.5, training=False); z.add_(1); return y
y = x.clone(); z = y.to(y.dtype); z.add_(1); return y
y = x.clone(); z = y + 0; z.add_(1); return y
m = x.new_zeros(6); w = m.view(2, 3); torch.nn.functional.batch_norm(x, m, m + 1, None, None, True, 1); return w
y = torch.arange(12.0, device=x.device).view(2, 6); y[0] += x[1]; return y
y = torch.arange(12.0, device=x.device); z = y.view(2, 6); z.add_(x); return y
y = x.clone(); z = y.to(y.device); z.add_(1); return y
y = x.clone(); z = y.to(device=y.device, dtype=y.dtype); z.add_(1); return y
y = x.clone(); y.view(torch.int16)[:, ::2] = 3; return y
y = x.clone(); y.view(torch.int32).bitwise_and_(0x7F800000); return y
y = x.long(); y.view(torch.int32)[:, 0] = 7; return y
y = torch.complex(x, x); y.view(torch.float32)[:, 1] = 7; return torch.view_as_real(y)
y = x.clone(); z = y.view(torch.int32); z += 1; y[0] = 5; return z
y = x.clone(); y.t().as_strided((2,), (1,)).zero_(); return y
y = x.clone(); return y[1].as_strided((2,), (1,), 4) * y.unfold(1, 2, 3)[1, :, 0]
y = x.clone(); a, b = y.split([2, 4], 1); b.copy_(a[:, :1].expand(2, 4)); return y
y = x.clone(); z = torch.einsum("ij->ji", y); z[0] = 9; return y
y = x.clone(); y[:, ::2].copy_(y[:, 1::2]); return y
y = x.clone(); y.add_(y.t().t()); return y
y = x.clone(); y[0].copy_(y[1]); y[1:].sub_(y[:1]); return y
y = x.clone(); y.put_(torch.tensor([0, 5, 5]), x[0, :3], accumulate=True); return y
"""

STALE = """
y = x.clone(); v = y.view(-1); y.add_(1); return v
y = x.clone(); a, b = y.chunk(2, -1); y.mul_(2); return a + b
y = x.clone(); z = y[0]; y.zero_(); return z
y = x.clone(); t = y.t(); y[0] = 7; return t
y = x.clone(); a = y[0]; b = y.view(-1)[:6]; a.add_(1); return b
y = x.clone(); a = y.view(-1); b = a.view(3, 4); y.sub_(1); return b
y = x.clone(); z = y.t().reshape(-1); y.zero_(); return z
y = x.clone(); z = y[[0, 1]]; y.zero_(); return z
y = x.clone(); z = y.float(); y.zero_(); return z
y = x.clone(); z = y.half(); y.zero_(); return z.float()
y = x.clone(); z = y.contiguous(); y.zero_(); return z
y = x.clone(); z = y.detach(); y += 1; return z
y = x.clone(); z = y.clone(); y += 1; return z
y = x.clone(); u = y.unbind(0); y[1] = 0; return u[1]
y = x.clone(); z = y.expand(3, 2, 6); y += 1; return z
y = torch.arange(6.0, device=x.device); z = y.view(2, 3); y += 1; return z + x[:, :3]
y = torch.arange(6.0, device=x.device); z = y.view(2, 3); y[0] = x[1, 1]; return z
y = x.clone(); y.unsqueeze_(0); y.add_(1); return y
y = x.clone(); z = y.view(-1); y.unsqueeze_(0); y.add_(1); return z
y = x.clone(); y.transpose_(0, 1); y[0] = 1; return y
y = x.clone(); y.t_(); return y.reshape(-1)
y = x[:1].clone(); y.squeeze_(0); return y
"""

DTYPES = """
return (x.int() * 0 + 2**30).cumsum(1)
return (x * 0 + 128).to(torch.uint8).cumsum(1)
return (x.int() * 0 + 7).cumprod(1).cumprod(0)
return (x > 3).cumsum(0)
return x[:, torch.arange(x.shape[1]) != 1]
return x[torch.arange(x.shape[0]) != 1, torch.arange(x.shape[0])[1:]]
y = x.clone(); y[:, torch.arange(x.shape[1]) != 1] = 0; return y
return x.argmax(-1)
return x.argsort(-1)
return x.topk(2)[1]
return x.sort(-1)[1]
return x.max(1)[1]
return x.median(1)[1]
return (x > 3).sum()
return (x > 3).cumsum(-1)
return torch.zeros_like(x, dtype=torch.float64) + x
return x.to(torch.float64) / 3
return x.double().sum()
return x.long() * 3_000_000_000
return torch.arange(100_000, device=x.device).sum() + x.long()
return (x.long() + 3_000_000) * 1_000_003
return x.softmax(-1, dtype=torch.float64)
return x.new_ones(2, dtype=torch.int64)
return x.type_as(torch.zeros(1, dtype=torch.float64, device=x.device))
return x.view(torch.int32)
return x.half() * torch.tensor(2.0)
return x.bfloat16() * 2.5
return x.int() / 2
return x.int() // 2
return x.int() * 2.5
return x.bool() + x.int()
return x.bfloat16() + x.half()
return x.int() + torch.tensor(1.5, dtype=torch.float64, device=x.device)
return x + torch.arange(6, device=x.device)
return torch.where(x > 3, 1, 0)
return torch.where(x > 3, x, 0.0)
return torch.cat([x.int(), x.bfloat16()])
return torch.stack([x[0].long(), x[1].long()])
return x.mean(dtype=torch.float64)
y = torch.empty(2, dtype=torch.int64, device=x.device); torch.sum(x / 2, 1, out=y); return y
y = torch.empty(0, dtype=torch.float64, device=x.device); torch.cumsum(x * 2 + 2**24, 1, out=y); return y
return torch.hann_window(6, device=x.device) * x + torch.kaiser_window(6).to(x.device)
return torch.fft.rfftfreq(10, device=x.device) + x + torch.tril_indices(3, 3, device=x.device)
return torch.nn.functional.affine_grid(x.view(2, 2, 3), (2, 1, 2, 2), align_corners=False)
return x.long().float().pow(2)
return torch.linspace(0, 1, 7, device=x.device, dtype=torch.float64)
return torch.exp(-torch.arange(0, 6, device=x.device) / 6) * x
return torch.full((2, 6), 3, device=x.device) * x
return x.int().prod()
return x.norm(0)
return torch.bucketize(x, torch.tensor([1.0, 5.0], device=x.device))
return torch.nn.functional.one_hot(x.long(), 12)
return (x * 100 - 300).to(torch.uint8)
y = torch.empty(2, 6, dtype=torch.int8, device=x.device); y.copy_(x * 100); return y
with torch.inference_mode(): return (x.int() & 6) + (x.int() | 1) - (x.int() ^ x.int()[0])
return (x.half() / 0).nan_to_num() * 0.5 + (x.bfloat16() / 0).nan_to_num(posinf=0.3)
y = x.clone(); with torch.inference_mode(): torch.nn.functional.dropout(y, 0.5, False).add_(1); return y
with torch.inference_mode(): return x.clone().chunk(2, 1)[0].add_(1) * x[:, :3]
return torch.nn.functional.grid_sample(x.view(1, 1, 3, 4), x.view(1, 2, 3, 2), "nearest", "reflection", False)
"""


REFUSED = """
y = x.clone(); y[x > 3].zero_(); return y
y = x.clone(); y.resize_(2, 6).add_(1); return y
y = x.clone(); y[:1].expand(3, 6).add_(1); return y
x.add_(1); return x
x.unsqueeze_(0); return x
x.view(-1)[0] = 1; return x
torch.sin(x, out=x); return x
y = x.new_empty(0); v = y.view(0, 2); torch.cat([x, x], out=y); return v
x[0] = 1; return x
a, b = x.chunk(2, -1); a.mul_(2); return x
y = x.clone(); y[:, 1:] = y[:, :-1]; return y
y = x.clone(); y.mul_(y[0]); return y
y = x.clone(); y.view(torch.int32).copy_(y); return y
return x[1].storage_offset()
return x.as_strided((2,), (1,), 0)
return (x.t() + 1).as_strided((2,), (1,))
"""
"""Writes that PyTorch refuses, that need a value while they are traced, or that only a caller would see."""


def functions(text):
    """Returns the programs of a table by their text, as functions of x."""
    made = {}
    for line in text.strip().splitlines():
        scope = {}
        exec(compile("import torch\ndef form(x):\n    " + line.replace("; ", "\n    "), line, "exec"), scope)
        made[line] = scope["form"]
    return made
