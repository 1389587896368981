//! Parquet files to documents. Built with the feature `parquet`, which is on by default.

use super::DataError;
use super::rows::{BadRow, Document, Fields, Row};
use parquet::basic::Repetition;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// The rows of a Parquet file, only the columns needed being read.
pub struct ParquetRows {
    rows: RowIter<'static>,
    fields: Fields,
    row: u64,
    /// Rows of the file.
    pub total: u64,
}

impl ParquetRows {
    /// Opens a file.
    pub fn open(path: &Path, fields: &Fields) -> Result<Self, DataError> {
        let refuse = |what: String| DataError::file(path, what);
        let file = File::open(path).map_err(|e| DataError::io(path, e))?;
        let reader =
            SerializedFileReader::new(file).map_err(|e| refuse(format!("not a Parquet file: {e}")))?;
        let metadata = reader.metadata().file_metadata();
        let total = u64::try_from(metadata.num_rows()).unwrap_or(0);
        let columns = metadata.schema().get_fields();
        let wanted = fields
            .prompt
            .iter()
            .chain([&fields.answer])
            .map(|name| {
                let column = columns.iter().find(|c| c.name() == name).ok_or_else(|| {
                    let present = columns.iter().map(|c| c.name()).collect::<Vec<_>>().join(", ");
                    refuse(format!("has no column {name:?}; its columns are {present}"))
                })?;
                if column.is_group() || column.get_basic_info().repetition() == Repetition::REPEATED {
                    return Err(refuse(format!("column {name:?} is nested; name one of text")));
                }
                Ok(column.clone())
            })
            .collect::<Result<Vec<Arc<Type>>, _>>()?;
        let projection = Type::group_type_builder(metadata.schema().name())
            .with_fields(wanted)
            .build()
            .map_err(|e| refuse(e.to_string()))?;
        let rows = RowIter::from_file_into(Box::new(reader))
            .project(Some(projection))
            .map_err(|e| refuse(e.to_string()))?;
        Ok(ParquetRows { rows, fields: fields.clone(), row: 0, total })
    }

    /// The next row.
    pub fn read_row(&mut self) -> Option<Row<Document>> {
        let row = self.rows.next()?;
        self.row += 1;
        let document = row.map_err(|e| format!("cannot be decoded: {e}")).and_then(|row| {
            let field = |name: &str| {
                let value = row.get_column_iter().find(|(n, _)| *n == name).map(|(_, v)| v);
                match value {
                    Some(Field::Str(s)) if s.contains('\0') => {
                        Err(format!("column {name:?} contains NUL, which text does not"))
                    }
                    Some(Field::Str(s)) => Ok(s.clone()),
                    Some(Field::Bytes(b)) => {
                        b.as_utf8().map(str::to_string).map_err(|_| format!("column {name:?} is not UTF-8"))
                    }
                    Some(Field::Null) | None => Err(format!("column {name:?} is null")),
                    Some(Field::Group(_) | Field::ListInternal(_) | Field::MapInternal(_)) => {
                        Err(format!("column {name:?} is nested; name one of text"))
                    }
                    Some(number) => Ok(number.to_string()),
                }
            };
            let prompt = self.fields.prompt.as_deref().map(field).transpose()?;
            Ok(self.fields.template.apply(prompt.as_deref(), &field(&self.fields.answer)?))
        });
        Some(document.map_err(|problem| BadRow { line: self.row, problem }))
    }

    /// Rows read so far.
    pub fn read(&self) -> u64 {
        self.row
    }
}
