def flattened(x, weight):  #? mhc
    """`W x` of all lanes of a token side by side, divided by their root mean square."""  #? mhc
    x = x.float().flatten(-2)  #? mhc
    return F.linear(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), weight.float())  #? mhc
#? mhc
#? mhc
class Lanes(nn.Module):
    """Around a part of a layer: what it reads of the lanes `[b, t, lanes, h]`, how they mix, and where its result goes."""

    def __init__(self, config, times):
        super().__init__()
        n, h = config.lanes, config.hidden_size
        self.times = times  # applications in loops, each with weights of its own  #? !mhc
        self.weight = nn.Parameter(torch.zeros(2 * n + n * n, n * h))  #? mhc
        self.bias, self.scale = nn.Parameter(torch.zeros(2 * n + n * n)), nn.Parameter(torch.full((3,), 0.01))  #? mhc
        each = (times,) if times else ()  #? !mhc
        self.alpha, self.beta = nn.Parameter(torch.ones(*each, n)), nn.Parameter(torch.ones(*each, n))  #? !mhc
        self.mix = nn.Parameter(torch.eye(n).repeat(*each, 1, 1))  # [to, from]  #? !mhc
        self.norm = Norm(h)  #? dynamic
        self.alpha_weight, self.beta_weight = nn.Parameter(torch.zeros(h)), nn.Parameter(torch.zeros(h))  #? dynamic
        self.mix_weight = nn.Parameter(torch.zeros(h, n))  #? dynamic
        self.alpha_scale, self.beta_scale = nn.Parameter(torch.full((1,), 0.01)), nn.Parameter(torch.full((1,), 0.01))  #? dynamic

    def numbers(self, x, at):
        """Of each lane, the share that is read of it and the share of the result that it gets; and how lanes mix, `[to, from]`."""
        alpha, beta, mix = self.alpha, self.beta, self.mix  #? !mhc
        if self.times:  #? !mhc
            turn = at.applied[self] = at.applied.get(self, -1) + 1  #? !mhc
            alpha, beta, mix = alpha[turn], beta[turn], mix[turn]  #? !mhc
        return alpha, beta, mix  #? !mhc&!dynamic
        x = self.norm(x)  #? dynamic
        alpha = alpha + self.alpha_scale * torch.tanh(x @ self.alpha_weight)  #? dynamic
        beta = beta + self.beta_scale * torch.tanh(x @ self.beta_weight)  #? dynamic
        mix = mix + self.alpha_scale * torch.tanh(x @ self.mix_weight).transpose(-1, -2)  #? dynamic
        return alpha, beta, mix  #? dynamic
        n = x.shape[-2]  #? mhc
        sizes = [n, n, n * n]  #? mhc
        parts = zip(flattened(x, self.weight).split(sizes, -1), self.bias.float().split(sizes), self.scale.float())  #? mhc
        alpha, beta, mix = (scale * z + bias for z, bias, scale in parts)  #? mhc
        # Doubly stochastic, by turns over columns and rows.  #? mhc
        mix = mix.unflatten(-1, (n, n)).softmax(-1) + 1e-6  #? mhc
        mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)  #? mhc
        for _ in range(19):  #? mhc
            mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)  #? mhc
            mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)  #? mhc
        numbers = alpha.sigmoid() + 1e-6, 2.0 * beta.sigmoid(), mix.transpose(-1, -2)  #? mhc
        return tuple(number.to(x.dtype) for number in numbers)  #? mhc

    def forward(self, x, at, part):
        alpha, beta, mix = self.numbers(x, at)
        y = part((alpha[..., None] * x).sum(-2))
        return mix @ x + beta[..., None] * y[..., None, :]
#? mhc
#? mhc
class LaneHead(nn.Module):  #? mhc
    """What the final norm reads of the lanes."""  #? mhc
#? mhc
    def __init__(self, config):  #? mhc
        super().__init__()  #? mhc
        n, h = config.lanes, config.hidden_size  #? mhc
        self.weight, self.bias = nn.Parameter(torch.zeros(n, n * h)), nn.Parameter(torch.zeros(n))  #? mhc
        self.scale = nn.Parameter(torch.full((1,), 0.01))  #? mhc
#? mhc
    def forward(self, x):  #? mhc
        share = (self.scale.float() * flattened(x, self.weight) + self.bias.float()).sigmoid() + 1e-6  #? mhc
        return (share.to(x.dtype)[..., None] * x).sum(-2)  #? mhc
