"""@TITLE@: the model in this folder.

Written by dreamc from its specification, with the parts that this model has and no others. Weights have the names
that they have there. Shapes: `b` texts, `t` tokens, `h` hidden size. Every component reads its own norm of the stream,  #? !wired
and its result is added to the stream.  #? !wired
that they have there. Shapes: `b` texts, `t` tokens, `h` hidden size. Every component reads its own norm of a mixture of  #? attend
the embedding and the results before it.  #? attend
that they have there. Shapes: `b` texts, `t` tokens, `h` hidden size. The stream has lanes; every component reads its own  #? lanes
norm of a mixture of them, and its result is added to each by a share.  #? lanes

@SKIPPING@
"""

import math  #? math
from dataclasses import dataclass, field  #? fields
from dataclasses import dataclass  #? !fields

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
