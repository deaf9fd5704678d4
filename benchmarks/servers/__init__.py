"""HTTP in front of libraries that are peers, each run in that peer's own environment: nobody may enter by import."""
