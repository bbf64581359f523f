"""What runs show, side by side: read from their folders, without torch or Lightning."""
