"""Settings: models without SDKs, loaded from layers, checked before anything connects."""

from archiver.settings.destination import Destination
from archiver.settings.models import Settings

__all__ = ["Destination", "Settings"]
