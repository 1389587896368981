class Projection(nn.Module):
    """A matrix."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.register_parameter("bias", None)  #? bias

    def forward(self, x, choice, at):  #? lora
        y = linear(x, self, at)  #? lora
        return y if self.bias is None else y + self.bias  #? lora&bias
        return y  #? lora&!bias
    def forward(self, x, choice):  #? !lora
        return F.linear(x, self.weight, self.bias)  #? !lora&bias
        return F.linear(x, self.weight)  #? !lora&!bias
