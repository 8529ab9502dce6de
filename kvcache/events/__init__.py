"""What is cached where, told to routers outside: the encoding of cache events."""

from kvcache.events.codec import EventCodec

__all__ = ["EventCodec"]
