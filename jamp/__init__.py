"""PyTorch's automatic mixed precision for JAX."""

from jamp._autocast import autocast as autocast
from jamp._autocast import get_autocast_dtype as get_autocast_dtype
from jamp._autocast import is_autocast_available as is_autocast_available
from jamp._autocast import is_autocast_enabled as is_autocast_enabled
from jamp._custom import custom_bwd as custom_bwd
from jamp._custom import custom_fwd as custom_fwd
from jamp._diagnose import Diagnosis as Diagnosis
from jamp._diagnose import diagnose as diagnose
from jamp._errors import AutocastError as AutocastError
from jamp._errors import AutocastTypeError as AutocastTypeError
from jamp._errors import BannedOpError as BannedOpError
from jamp._errors import JampError as JampError
from jamp._errors import JampWarning as JampWarning
from jamp._errors import PolicyError as PolicyError
from jamp._errors import ScalerError as ScalerError
from jamp._errors import ScalerTypeError as ScalerTypeError
from jamp._explain import Report as Report
from jamp._explain import explain as explain
from jamp._loss_scaling.metrics import metrics as metrics
from jamp._loss_scaling.scaler import GradScaler as GradScaler
from jamp._loss_scaling.scaler import ScalerState as ScalerState
from jamp._loss_scaling.transformation import (
    DynamicLossScalingState as DynamicLossScalingState,
)
from jamp._loss_scaling.transformation import (
    dynamic_loss_scaling as dynamic_loss_scaling,
)
from jamp._loss_scaling.transformation import last_step_skipped as last_step_skipped
from jamp._loss_scaling.transformation import loss_scale as loss_scale
from jamp._loss_scaling.transformation import scale_loss as scale_loss
from jamp._loss_scaling.transformation import value_and_grad as value_and_grad
from jamp._policy.policy import Policy as Policy

__version__ = "0.1.0"

__all__ = [
    "AutocastError",
    "AutocastTypeError",
    "BannedOpError",
    "Diagnosis",
    "DynamicLossScalingState",
    "GradScaler",
    "JampError",
    "JampWarning",
    "Policy",
    "PolicyError",
    "Report",
    "ScalerError",
    "ScalerState",
    "ScalerTypeError",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "dynamic_loss_scaling",
    "explain",
    "get_autocast_dtype",
    "is_autocast_available",
    "is_autocast_enabled",
    "last_step_skipped",
    "loss_scale",
    "metrics",
    "scale_loss",
    "value_and_grad",
]
