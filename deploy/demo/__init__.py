"""The main job on one machine: three tenants, real models, every answer checked."""
