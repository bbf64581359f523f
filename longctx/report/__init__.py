"""What runs show, side by side or while they train. Reads the files of run folders only: neither
torch nor Lightning.
"""
