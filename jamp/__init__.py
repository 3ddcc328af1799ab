"""PyTorch's automatic mixed precision for JAX."""

from jamp._autocast import autocast as autocast
from jamp._autocast import get_autocast_dtype as get_autocast_dtype
from jamp._autocast import is_autocast_available as is_autocast_available
from jamp._autocast import is_autocast_enabled as is_autocast_enabled
from jamp._custom import custom_bwd as custom_bwd
from jamp._custom import custom_fwd as custom_fwd
from jamp._errors import AutocastError as AutocastError
from jamp._errors import AutocastTypeError as AutocastTypeError
from jamp._errors import BannedOpError as BannedOpError
from jamp._errors import JampError as JampError
from jamp._errors import JampWarning as JampWarning
from jamp._errors import PolicyError as PolicyError
from jamp._policy import Policy as Policy
from jamp._report import Report as Report
from jamp._report import explain as explain

__version__ = "0.1.0"

__all__ = [
    "AutocastError",
    "AutocastTypeError",
    "BannedOpError",
    "JampError",
    "JampWarning",
    "Policy",
    "PolicyError",
    "Report",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "explain",
    "get_autocast_dtype",
    "is_autocast_available",
    "is_autocast_enabled",
]
