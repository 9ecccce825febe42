"""What every engine offers to applications and adapters, wherever its members run."""
