"""@TITLE@: the model in this folder.

Written by dreamc from its specification, with the parts that this model has and no others. Weights have the names
that they have there. Shapes: `b` texts, `t` tokens, `h` hidden size. Every component reads its own norm of the stream,
and its result is added to the stream.

@SKIPPING@
"""

import math  #? math
from dataclasses import dataclass, field  #? depth|save
from dataclasses import dataclass  #? !depth&!save

import numpy as np  #? noise
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_dreamc import DreamcConfig

EPS = @EPS@
