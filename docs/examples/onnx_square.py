def square(image):
    image = ImageOps.exif_transpose(image).convert(mode)
    side, length = view["image_size"], view["resize"]
    if view["test_view"] == "squash":
        return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
    if view["test_view"] == "letterbox":
        return np.asarray(ImageOps.pad(image, (side, side), Image.Resampling.BICUBIC))
    shorter = min(image.size)
    image = image.resize([length * n // shorter for n in image.size], Image.Resampling.BICUBIC)
    left, top = (round((n - side) / 2) - round((length - side) / 2) for n in image.size)
    return np.asarray(image.crop((left, top, left + length, top + length)))
