"""An operator out of an annotated signature: its registration, fake, derivatives, sharding and FLOPs."""
