"""The processes of one command on several devices, for training and evaluation alike."""
